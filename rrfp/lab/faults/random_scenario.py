"""Makes the scenario of a seed: a small random pipeline, how it is scheduled, its steps, their times, and its faults.

The seed decides everything. What it makes also depends on the hints and schedules that are registered, so a seed stands
for one version of this package with one set of plugins.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from rrfp.arbiter.coordination import GroupMessageKind
from rrfp.core.hint import Hint, View
from rrfp.core.ready_set import ForcedOrder, ReadySet, natural_order
from rrfp.errors import ConfigError
from rrfp.hints.registry import HintSpec, create_hint, create_strict, hint_names
from rrfp.lab.cluster.ranks import Rank
from rrfp.lab.explore.cases import random_visits
from rrfp.lab.faults.cluster import FaultCluster
from rrfp.lab.faults.faults import (
    AnyId,
    ClaimMessageId,
    Death,
    Delay,
    Duplicate,
    Fault,
    GroupMessageId,
    Lose,
    MessageFault,
    MessageId,
    Pause,
    Spike,
    Swap,
)
from rrfp.lab.faults.scenario import Parallelism, Rows, Scenario, SharedForwards
from rrfp.memory.admission import DEFAULT_RULE, OFFERED_RULES, RULES, Limit
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import Placement, TablePlacement
from rrfp.model.tasks import SENT_TO, Kind, Mode, StepId, Task
from rrfp.schedules.registry import make_schedule, schedule_names


class RandomFaults:
    """Draws the faults of a scenario that has none yet."""

    def __init__(self, rng: random.Random, scenario: Scenario) -> None:
        self._rng = rng
        self._graph = graph = scenario.graph
        self._ranks = scenario.ranks
        self._parallelism = scenario.parallelism
        self._reports_bytes = scenario.limits[0].bytes is not None
        self._steps = scenario.steps
        self._horizon = _horizon(scenario)
        where = graph.placement.stage_of
        pairs = [(u, v) for u, v in graph.edges or () if where(u) != where(v)]
        #: Edges between stages: both virtual stages, and where they are.
        self._edges = [(u, v, where(u), where(v)) for u, v in pairs]
        visits = scenario.visits_of(self._steps[0])
        #: What is sent where microbatches skip something: a microbatch and an edge of its own graph.
        self._sent = [
            (m, edge)
            for edge in self._edges
            for m in range(visits.microbatches)
            if visits.skipped_by(m).isdisjoint(edge[:2])
        ]
        self._skips = visits.are_partial

    def draw(self) -> tuple[Fault, ...]:
        number = self._rng.choice([0, 1, 1, 1, 1, 1, 1, 2, 2, 3])
        faults: list[Fault] = []
        hit: set[AnyId] = set()
        for _ in range(number):
            fault = self._fault()
            if isinstance(fault, MessageFault):
                if fault.message in hit:
                    continue  # what a transport does to one message twice is one fault, not two
                hit.add(fault.message)
            if isinstance(fault, Death) and any(isinstance(other, Death) for other in faults):
                continue  # two deaths at once leave open whose name comes first
            faults.append(fault)
        return tuple(faults)

    def _fault(self) -> Fault:
        rng = self._rng
        if not self._sent and not self._parallelism.members > 1:
            return Pause(rng.choice(self._ranks), self._instant(), self._instant())
        return self._any_fault()

    def _any_fault(self) -> Fault:
        rng = self._rng
        makers: list[Callable[[], Fault]] = [self._spike, self._pause, self._death, self._duplicate, self._delay]
        makers += [lambda: Lose(self._message())] * 2 + [lambda: Swap(self._message())]
        return rng.choice(makers)()

    def _instant(self) -> float:
        return self._rng.random() * self._horizon

    def _spike(self) -> Spike:
        if self._is_in_group():
            first, second = self._pair()
        else:
            _, _, below, above = self._rng.choice(self._edges)
            first, second = self._counterparts(below, above)
        sender, receiver = self._rng.sample([first, second], 2)
        start = self._instant()
        return Spike(sender, receiver, start, start + self._instant(), self._instant() / 2)

    def _pause(self) -> Pause:
        return Pause(self._rng.choice(self._ranks), self._instant(), self._instant())

    def _death(self) -> Death:
        rank = self._rng.choice(self._ranks)
        return Death(rank, self._instant(), self._instant() / 4, self._rng.random() < 0.5)

    def _duplicate(self) -> Duplicate:
        return Duplicate(self._message(), self._rng.choice([0.0, 0.1, 1.0]) * self._instant())

    def _delay(self) -> Delay:
        return Delay(self._message(), self._rng.random() < 0.6)

    def _message(self) -> AnyId:
        if self._is_in_group():
            return self._group_message()
        rng, step = self._rng, self._rng.choice(self._steps)
        if self._skips:
            microbatch, (u, v, below, above) = rng.choice(self._sent)
        else:
            u, v, below, above = rng.choice(self._edges)
            microbatch = rng.randrange(step.microbatches)
        backwards = rng.random() < 0.5
        lower, upper = self._counterparts(below, above)
        if not backwards:
            return MessageId(step.number, Task(Kind.F, microbatch, u), lower, upper)
        if step.mode is Mode.FORWARD:
            return MessageId(step.number, Task(Kind.F, microbatch, u), upper, lower, is_credit=True)
        return MessageId(step.number, Task(Kind.B, microbatch, v), upper, lower)

    def _is_in_group(self) -> bool:
        return self._parallelism.members > 1 and (not self._edges or self._rng.random() < 0.7)

    def _counterparts(self, *stages: int) -> list[Rank]:
        chosen = self._rng.choice(self._ranks)
        counterparts = [r for r in self._ranks if (r.replica, r.member) == (chosen.replica, chosen.member)]
        return [counterparts[stage] for stage in stages]

    def _pair(self) -> tuple[Rank, Rank]:
        """The first rank of some group, and another."""
        follower = self._rng.choice([rank for rank in self._ranks if rank.member])
        first = next(r for r in self._ranks if (r.stage, r.replica, r.member) == (follower.stage, follower.replica, 0))
        return first, follower

    def _group_message(self) -> GroupMessageId:
        """Any message inside a group that the run is certain to send."""
        rng, step = self._rng, self._rng.choice(self._steps)
        first, other = self._pair()
        tasks = list(self._graph.tasks(first.stage, step.microbatches, step.mode))
        number = rng.randrange(len(tasks))
        if self._parallelism.agrees:
            down = rng.random() < 0.5
            kind, way = (
                (GroupMessageKind.OUTCOME, (first, other)) if down else (GroupMessageKind.PROPOSE, (other, first))
            )
            return GroupMessageId(step.number, kind, number, *way)
        reported = [task for task in tasks if self._reads_elsewhere(task)]
        choices: list[GroupMessageId] = [GroupMessageId(step.number, GroupMessageKind.ORDER, number, first, other)]
        if reported:
            choices.append(GroupMessageId(step.number, GroupMessageKind.READY, rng.choice(reported), other, first))
        if self._reports_bytes:
            choices.append(GroupMessageId(step.number, GroupMessageKind.HELD, rng.choice(tasks), other, first))
        return rng.choice(choices)

    def _reads_elsewhere(self, task: Task) -> bool:
        where = self._graph.placement.stage_of
        return any(where(source.virtual_stage) != where(task.virtual_stage) for source in self._graph.inputs(task))


class RandomClaimFaults(RandomFaults):
    """Where replicas share forwards, who sends what shows in a run without faults alone: ``sent`` there, and when."""

    def __init__(self, rng: random.Random, scenario: Scenario, sent: Sequence[tuple[float, AnyId]]) -> None:
        super().__init__(rng, scenario)
        #: Messages by what they are, so that there are faults of each sort.
        self._by_sort: dict[str, list[AnyId]] = {}
        for _, message in sent:
            self._by_sort.setdefault(message.sort, []).append(message)
        self._moments = [time for time, message in sent if isinstance(message, ClaimMessageId)]
        self._latency = scenario.control_latency

    def _fault(self) -> Fault:
        return self._any_fault() if self._by_sort else self._pause()

    def _instant(self) -> float:
        """At times while something is said of a forward."""
        if not self._moments or self._rng.random() < 0.5:
            return super()._instant()
        return self._rng.choice(self._moments) + self._rng.random() * self._latency

    def _spike(self) -> Spike:
        message, start = self._message(), self._instant()
        return Spike(message.sender, message.receiver, start, start + self._instant(), self._instant() / 2)

    def _message(self) -> AnyId:
        return self._rng.choice(self._by_sort[self._rng.choice(list(self._by_sort))])


def _horizon(scenario: Scenario) -> float:
    """About how long the run takes, so that faults fall into it."""
    durations, latencies, steps = scenario.durations, scenario.latencies, scenario.steps
    microbatches = max(step.microbatches for step in steps)
    each = sum(sum(row) for rows in durations.values() for row in rows) / microbatches
    latency = sum(sum(row) for rows in latencies.values() for row in rows) / microbatches
    rounds = sum(step.microbatches / scenario.graph.placement.stages + 1 for step in steps)
    return 0.6 * (rounds * each + len(steps) * latency)


_RANDOM = "random"
_STRICT = "strict "

#: The share of seeds whose graph is any, and no chain; there each stage has one rank. Drawn apart from all else.
_BRANCHES = 0.2

#: The share of seeds whose replicas share forwards; drawn apart, too.
_SHARED = 0.15

#: Hints whose choice is a function of the ready set and of what ran: the only ones that must come to an agreement.
_AGREEABLE = ("bf", "fb", "b-priority", "f-priority", "bfw")


class AnyReady(Hint):
    """Takes any ready task, by a generator of its own."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        return self._random.choice(list(ready))


def make_scenario(seed: int, hint: HintSpec | None = None, *, alone: bool = False) -> Scenario:
    """The run of a seed.

    Args:
        seed: any whole number.
        hint: use this hint instead of the one that the seed picks.
        alone: each stage has one rank, whatever the seed says, and no limit is in bytes. So it is where the graph is no
            chain.
    """
    shape, branches, pool = random.Random(seed), random.Random(f"{seed} branches"), random.Random(f"{seed} pool")
    graph, has_branches = _graph(shape), branches.random() < _BRANCHES
    if has_branches:
        graph = _branches(branches)
    steps = _steps(shape)
    may_share = not alone and not has_branches and any(step.mode is Mode.TRAIN for step in steps)
    shares = may_share and pool.random() < _SHARED and (hint is None or not create_hint(hint).may_wait)
    graph = _shared_graph(pool) if shares else graph
    stages, count = graph.placement.stages, graph.placement.num_virtual_stages
    has_skips = branches.random() < has_branches / 2
    visits = random_visits(count, steps[0].microbatches, branches) if has_skips else None
    steps = steps[:1] if visits is not None and visits.are_partial else steps
    most = max(step.microbatches for step in steps)
    durations, latencies = _durations(shape, count, most), _latencies(shape, count, most)
    control_latency = shape.choice([0.0, 0.1, 1.0]) * shape.random()
    release_after = shape.choice([0.0, 0.0, 1.0]) * shape.random()
    gaps = tuple([shape.choice([0.0, 1.0]) * shape.random() for _ in range(stages)])
    depth = shape.choice([1, 1, 2])
    sizes = tuple([float(shape.randint(1, 9)) for _ in range(most)]) if shape.random() < 0.5 else None
    method, make_hint = _method(random.Random(f"{seed} method"), graph, steps, may_wait=not shares)
    if hint is not None:
        method, make_hint = hint if isinstance(hint, str) else "the given hint", lambda stage: create_hint(hint)
    limits, in_order = _gates(shape, graph, most, may_wait=make_hint(0).may_wait)
    in_order = frozenset() if shares else in_order
    together = random.Random(f"{seed} crew")
    alone = alone or has_branches
    parallelism = Parallelism() if alone else _parallelism(together, stages, most, may_agree=method in _AGREEABLE)
    shared = None
    if shares:
        parallelism = Parallelism(replicas=pool.choice([2, 2, 3]))
        shared = _shared(pool, stages, parallelism.replicas, steps)
        # Drawn apart, as `_takes_offers`.
        shared = replace(shared, is_even=not shared.are_known and random.Random(f"{seed} even").random() < 0.5)
        limits = _shared_limits(pool, limits, graph.placement.chunks, shared.bytes_held)
    elif any(parallelism.bytes_held) and RULES[limits[0].rule].counts_bytes and not make_hint(0).may_wait:
        room = max(parallelism.bytes_held) * graph.placement.chunks * together.choice([1, 1, 2, most])
        is_free = together.random() < 0.5
        limits = tuple([Limit(None if is_free else limit.microbatches, room) for limit in limits])
    scenario = Scenario(
        seed=seed,
        graph=graph,
        method=method,
        make_hint=make_hint,
        limits=limits,
        in_order=in_order,
        depth=depth,
        steps=steps,
        sizes=sizes,
        durations=durations,
        latencies=latencies,
        control_latency=control_latency,
        release_after=release_after,
        gaps=gaps,
        faults=(),
        parallelism=parallelism,
        takes_offers=_takes_offers(seed, depth, parallelism, limits),
        visits=visits if visits is not None and visits.are_partial else None,
        shared=shared,
    )
    rng = random.Random(f"{seed} faults")
    if not shares:
        return replace(scenario, faults=RandomFaults(rng, scenario).draw())
    without = FaultCluster(scenario)
    without.run()
    return replace(scenario, faults=RandomClaimFaults(rng, scenario, without.network.sent).draw())


def _shared(rng: random.Random, stages: int, copies: int, steps: Sequence[StepId]) -> SharedForwards:
    homes = tuple([tuple([rng.randrange(copies) for _ in range(step.microbatches)]) for step in steps])
    paces = tuple([tuple([rng.choice([1.0, 1.0, 2.0, 5.0]) for _ in range(copies)]) for _ in range(stages)])
    depth, are_known, most = rng.choice([1, 1, 2, 3]), rng.random() < 0.5, max(map(len, homes))
    held = tuple([rng.randint(1, 9) for _ in range(most)]) if rng.random() < 0.4 else ()
    return SharedForwards(homes, depth, paces, are_known, held)


def _shared_graph(rng: random.Random) -> TaskGraph:
    """A short chain, with one chunk a stage or with several."""
    placement = Placement(rng.choice([1, 2, 2, 3]), rng.choice([1, 1, 2, 3]), rng.choice(["looped", "v"]))
    return TaskGraph(placement, split=_split(rng, placement.num_virtual_stages))


def _shared_limits(rng: random.Random, limits: Sequence[Limit], chunks: int, held: Sequence[int]) -> tuple[Limit, ...]:
    """Limits that claims go with; where microbatches hold bytes, at times fewer than the largest."""
    rule = RULES[limits[0].rule]
    if chunks > 1 and rule.drains_in_order:
        return tuple([Limit(limit.microbatches) for limit in limits])
    if not held or not rule.counts_bytes:
        return tuple(limits)
    room, is_free = chunks * rng.choice([min(held), max(held), 2 * max(held), sum(held)]), rng.random() < 0.5
    return tuple([Limit(None if is_free else limit.microbatches, room) for limit in limits])


def _takes_offers(seed: int, depth: int, parallelism: Parallelism, limits: Sequence[Limit]) -> bool:
    # Drawn apart, so that it changes nothing else of a seed.
    is_possible = depth == 1 and parallelism.members == 1 and limits[0].bytes is None
    return is_possible and random.Random(f"{seed} offers").random() < 0.5


def _graph(rng: random.Random) -> TaskGraph:
    """A chain, at times with a skip edge, each virtual stage split or not."""
    placement = Placement(rng.choice([1, 2, 2, 2, 3, 3, 4, 5]), rng.choice([1, 1, 2]), rng.choice(["looped", "v"]))
    count = placement.num_virtual_stages
    edges = [(v, v + 1) for v in range(count - 1)]
    if count > 2 and rng.random() < 0.15:
        u = rng.randrange(count - 2)
        edges.append((u, rng.randrange(u + 2, count)))
    return TaskGraph(placement, tuple(edges), _split(rng, count))


def _split(rng: random.Random, count: int) -> tuple[bool, ...]:
    share = rng.choice([0.0, 1.0, 0.5])
    return tuple([rng.random() < share for _ in range(count)])


def _branches(rng: random.Random) -> TaskGraph:
    """Up to six virtual stages with any edges, on up to four stages."""
    count, density = rng.randint(2, 6), rng.choice([0.3, 0.5, 0.8])
    edges = tuple([(u, v) for v in range(count) for u in range(v) if rng.random() < density])
    drawn = [rng.randrange(4) for _ in range(count)]
    numbers = {stage: number for number, stage in enumerate(dict.fromkeys(drawn))}
    return TaskGraph(TablePlacement(tuple([numbers[stage] for stage in drawn])), edges, _split(rng, count))


def _steps(rng: random.Random) -> tuple[StepId, ...]:
    number = rng.choice([1, 1, 2, 3])
    most = rng.choice([1, 2, 3, 3, 4, 4, 5, 6, 8]) if number == 1 else rng.choice([1, 2, 2, 3, 4])
    modes = [rng.choice([Mode.TRAIN, Mode.TRAIN, Mode.FORWARD]) for _ in range(number)]
    return tuple([StepId(i, mode, most if i == 0 else rng.randint(1, most)) for i, mode in enumerate(modes)])


def _durations(rng: random.Random, count: int, microbatches: int) -> dict[Kind, Rows]:
    """By virtual stage, with single tasks longer; at times whole numbers."""
    speeds = [rng.uniform(0.5, 2.0) for _ in range(count)]
    jitter, is_whole = rng.choice([0.0, 1.0, 5.0]), rng.random() < 0.2

    def row(base: float) -> tuple[float, ...]:
        times = [base * (1.0 + jitter * rng.random() ** 4) for _ in range(microbatches)]
        return tuple([float(round(time)) for time in times] if is_whole else times)

    scale = {Kind.F: 1.0, Kind.B: 1.5, Kind.W: 0.7}
    return {kind: tuple([row(speed * scale.get(kind, 1.0)) for speed in speeds]) for kind in Kind}


def _latencies(rng: random.Random, count: int, microbatches: int) -> dict[Kind, Rows]:
    base, jitter = rng.choice([0.0, 0.1, 1.0]), rng.choice([0.0, 1.0, 5.0])
    return {
        kind: tuple([tuple([base + jitter * rng.random() ** 3 for _ in range(microbatches)]) for _ in range(count)])
        for kind in SENT_TO
    }


def _gates(
    rng: random.Random, graph: TaskGraph, microbatches: int, *, may_wait: bool
) -> tuple[tuple[Limit, ...], frozenset[ForcedOrder]]:
    """Limits and forced orders, which may keep a task out."""
    limits, in_order = _limits(rng, graph, microbatches), _in_order(rng, graph)
    if may_wait:  # a hint that waits for one task must never find it blocked
        return (Limit(),) * graph.placement.stages, frozenset()
    return limits, in_order if RULES[limits[0].rule].fits_forced_order else frozenset()


def _in_order(rng: random.Random, graph: TaskGraph) -> frozenset[ForcedOrder]:
    """At times one kind runs in microbatch order on most virtual stages, or all do on all."""
    # Often enough for 600 runs to show that the reserve rule is missing: that takes a small limit and bad luck as
    # well.
    chance = rng.random()
    if chance >= 0.4:
        return natural_order(graph) if chance < 0.5 else frozenset()
    kind = rng.choice([*Kind])
    return frozenset([(kind, v) for v in range(graph.placement.num_virtual_stages) if rng.random() < 0.8])


def _limits(rng: random.Random, graph: TaskGraph, microbatches: int) -> tuple[Limit, ...]:
    stages = graph.placement.stages
    others = [name for name in OFFERED_RULES if name != DEFAULT_RULE]
    spec = rng.choice(["1f1b", "1f1b", "2n", None, 1, rng.randint(1, microbatches + 1), *others, "own"])
    if spec in others:
        return (Limit(rng.randint(1, microbatches), rule=str(spec)),) * stages
    if spec == "own":
        return tuple([Limit(rng.randint(1, microbatches + 1)) for _ in range(stages)])
    return tuple([Limit.resolve(spec, stage, stages) for stage in range(stages)])


@functools.cache
def _methods() -> tuple[str, ...]:
    """Every registered hint, a random one, and every schedule to the letter."""
    return (*hint_names(), _RANDOM, _RANDOM, *(f"{_STRICT}{name}" for name in schedule_names()))


def _method(
    rng: random.Random, graph: TaskGraph, steps: Sequence[StepId], *, may_wait: bool
) -> tuple[str, Callable[[int], Hint]]:
    """A method that fits: many schedules are for one chunk a stage."""
    methods = [name for name in _methods() if may_wait or not name.startswith(_STRICT)]
    name = next(name for name in rng.sample(methods, len(methods)) if _fits(name, graph, steps))
    if name == _RANDOM:
        seeds = [rng.randrange(2**32) for _ in range(graph.placement.stages)]
        return name, lambda stage: AnyReady(seeds[stage])
    if name.startswith(_STRICT):
        return name, lambda stage: create_strict(name.removeprefix(_STRICT))
    return name, lambda stage: create_hint(name)


def _fits(name: str, graph: TaskGraph, steps: Sequence[StepId]) -> bool:
    schedule = name.removeprefix(_STRICT)
    if schedule not in schedule_names():
        return True
    try:
        for step in steps:
            make_schedule(schedule, graph, step.microbatches)
    except ConfigError:
        return False
    return True


def _parallelism(rng: random.Random, stages: int, microbatches: int, *, may_agree: bool) -> Parallelism:
    """Mostly one rank a stage; groups and replicas of small pipelines."""
    is_small = stages <= 3 and stages * microbatches <= 12
    members = rng.choice([1, 1, 1, 1, 1, 2, 2, 3]) if is_small else 1
    replicas = rng.choice([1, 1, 1, 1, 1, 1, 2]) if is_small and members < 3 else 1
    agrees = may_agree and rng.random() < 0.4
    sizes = tuple([rng.choice([1, 1, 2, 5, 9]) for _ in range(members)])
    coupled = rng.random() < 0.7
    bytes_held = sizes if rng.random() < 0.4 and not agrees else (0,) * members
    rng.random()  # decides nothing; without it the seeds that tests name would draw other runs
    return Parallelism(
        replicas=replicas,
        members=members,
        coordination="agreement" if agrees else "leader",
        coupled=coupled,
        bytes_held=bytes_held,
        jitter=rng.choice([0.0, 1.0, 5.0]) if members > 1 else 0.0,
    )
