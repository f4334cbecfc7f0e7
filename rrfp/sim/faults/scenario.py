"""From a seed to one run: a small random pipeline, how it is scheduled, its steps, what they take, and its faults.

The seed decides everything. What it makes also depends on the hints and schedules that are registered, so a seed stands
for one version of this package with one set of plugins.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rrfp.core.admission import Limit
from rrfp.core.events import Arrived
from rrfp.core.graph import Graph
from rrfp.core.hint import Hint, View
from rrfp.core.placement import Placement
from rrfp.core.readiness import ForcedOrder
from rrfp.core.ready_set import ReadySet
from rrfp.core.tasks import Kind, Mode, StepId, Task
from rrfp.errors import ConfigError
from rrfp.hints.registry import HintSpec, create_hint, create_strict, hint_names
from rrfp.schedules.registry import make_schedule, schedule_names
from rrfp.sim.faults.crew import AGREEABLE, ALONE, Crew, draw_crew
from rrfp.sim.faults.faults import Fault
from rrfp.sim.faults.random_faults import draw_faults

#: For each virtual stage, a number of seconds for each microbatch.
Rows = tuple[tuple[float, ...], ...]

_RANDOM = "random"
_STRICT = "strict "


class AnyReady(Hint):
    """Takes any ready task.

    Args:
        seed: of its own generator.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        """See `rrfp.core.hint.Hint.choose`."""
        return self._random.choice(list(ready))


@dataclass(frozen=True)
class Scenario:
    """One run. Times are in seconds.

    Attributes:
        seed: what it was made from.
        graph: the dependency graph.
        method: how it is scheduled, in words: "bf", "random", "strict 1f1b".
        make_hint: makes the hint of a stage.
        limits: one a stage.
        in_order: (kind, virtual stage) pairs that run in microbatch order.
        depth: tasks enqueued and not complete, at most, a stage.
        steps: the steps, in order.
        sizes: of the microbatches, where hints receive them.
        durations: of a task, by kind, virtual stage and microbatch.
        latencies: of an output, by kind, virtual stage and microbatch of its task.
        control_latency: of credits, and of the report that a rank failed, for each stage that it passes.
        release_after: from the start of a send until its memory is free.
        gaps: for each stage, from the end of one step to the beginning of the next.
        faults: what goes wrong.
        crew: how many ranks a stage has, and how they work together.
    """

    seed: int
    graph: Graph
    method: str
    make_hint: Callable[[int], Hint]
    limits: tuple[Limit, ...]
    in_order: frozenset[ForcedOrder]
    depth: int
    steps: tuple[StepId, ...]
    sizes: tuple[float, ...] | None
    durations: Mapping[Kind, Rows]
    latencies: Mapping[Kind, Rows]
    control_latency: float
    release_after: float
    gaps: tuple[float, ...]
    faults: tuple[Fault, ...]
    crew: Crew = ALONE

    def describe(self) -> list[str]:
        """The run in lines of text: the pipeline, how it is scheduled, its steps, and a line a fault."""
        placement, split = self.graph.placement, sum(self.graph.split)
        chunks = "" if placement.chunks == 1 else f" x {placement.chunks} chunks ({placement.layout})"
        skips = [f"{u}->{v}" for u, v in self.graph.edges or () if v != u + 1]
        parts = [
            f"{placement.stages} stage(s){chunks}",
            f"{split} of {placement.num_virtual_stages} virtual stages split",
            *([f"skip edges {' '.join(skips)}"] if skips else []),
        ]
        forced = " ".join(f"{kind}@{v}" for kind, v in sorted(self.in_order))
        limits = " ".join("-" if limit.microbatches is None else str(limit.microbatches) for limit in self.limits)
        crew = self.crew.describe()
        return [
            f"pipeline: {', '.join(parts)}",
            *([f"ranks: {'; '.join(crew)}"] if crew else []),
            f"schedule: {self.method}, limits by stage: {limits} ({self._rule}), depth {self.depth}",
            *([f"in microbatch order: {forced}"] if forced else []),
            f"steps: {'; '.join(f'{step.mode}, {step.microbatches} microbatches' for step in self.steps)}",
            *[f"fault: {fault}" for fault in self.faults],
        ]

    def latency(self, output: Arrived, member: int) -> float:
        """How long ``output`` travels to ``member`` of the stage that reads it, in seconds."""
        kind, microbatch, virtual_stage = output.task
        lag = self.crew.lag(output.step.number, microbatch, virtual_stage, member)
        return self.latencies[kind][virtual_stage][microbatch] + lag

    @property
    def _rule(self) -> str:
        first = self.limits[0]
        return first.rule if first.bytes is None else f"{first.rule}, {first.bytes} bytes"


def make_scenario(seed: int, hint: HintSpec | None = None, *, alone: bool = False) -> Scenario:
    """The run of a seed.

    Args:
        seed: any whole number.
        hint: use this hint instead of the one that the seed picks.
        alone: each stage has one rank, whatever the seed says, and no limit is in bytes.
    """
    shape = random.Random(seed)
    graph = _graph(shape)
    stages, count = graph.placement.stages, graph.placement.num_virtual_stages
    steps = _steps(shape)
    most = max(step.microbatches for step in steps)
    durations, latencies = _durations(shape, count, most), _latencies(shape, count, most)
    control_latency = shape.choice([0.0, 0.1, 1.0]) * shape.random()
    release_after = shape.choice([0.0, 0.0, 1.0]) * shape.random()
    gaps = tuple([shape.choice([0.0, 1.0]) * shape.random() for _ in range(stages)])
    depth = shape.choice([1, 1, 2])
    sizes = tuple([float(shape.randint(1, 9)) for _ in range(most)]) if shape.random() < 0.5 else None
    method, make_hint = _method(random.Random(f"{seed} method"), graph, steps)
    if hint is not None:
        method, make_hint = hint if isinstance(hint, str) else "the given hint", lambda stage: create_hint(hint)
    limits, in_order = _gates(shape, graph, most, may_wait=make_hint(0).may_wait)
    horizon = _horizon(graph, steps, durations, latencies)
    together = random.Random(f"{seed} crew")
    crew = ALONE if alone else draw_crew(together, stages, most, may_agree=method in AGREEABLE)
    if any(crew.bytes_held) and limits[0].rule != "paper" and not make_hint(0).may_wait:
        room = max(crew.bytes_held) * graph.placement.chunks * together.choice([1, 1, 2, most])
        is_free = together.random() < 0.5
        limits = tuple([Limit(None if is_free else limit.microbatches, room) for limit in limits])
    faults = draw_faults(random.Random(f"{seed} faults"), graph, steps, horizon, crew, limits)
    return Scenario(
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
        faults=faults,
        crew=crew,
    )


def _graph(rng: random.Random) -> Graph:
    """A chain, at times with one skip edge, with each virtual stage split or not."""
    placement = Placement(rng.choice([1, 2, 2, 2, 3, 3, 4, 5]), rng.choice([1, 1, 2]), rng.choice(["looped", "v"]))
    count = placement.num_virtual_stages
    edges = [(v, v + 1) for v in range(count - 1)]
    if count > 2 and rng.random() < 0.15:
        u = rng.randrange(count - 2)
        edges.append((u, rng.randrange(u + 2, count)))
    share = rng.choice([0.0, 1.0, 0.5])
    return Graph(placement, tuple(edges), tuple([rng.random() < share for _ in range(count)]))


def _steps(rng: random.Random) -> tuple[StepId, ...]:
    number = rng.choice([1, 1, 2, 3])
    most = rng.choice([1, 2, 3, 3, 4, 4, 5, 6, 8]) if number == 1 else rng.choice([1, 2, 2, 3, 4])
    modes = [rng.choice([Mode.TRAIN, Mode.TRAIN, Mode.FORWARD]) for _ in range(number)]
    return tuple([StepId(i, mode, most if i == 0 else rng.randint(1, most)) for i, mode in enumerate(modes)])


def _durations(rng: random.Random, count: int, microbatches: int) -> dict[Kind, Rows]:
    """Every virtual stage has its own speed; single tasks are longer by chance; at times all are whole numbers."""
    speeds = [rng.uniform(0.5, 2.0) for _ in range(count)]
    jitter, is_whole = rng.choice([0.0, 1.0, 5.0]), rng.random() < 0.2

    def row(base: float) -> tuple[float, ...]:
        times = [base * (1.0 + jitter * rng.random() ** 4) for _ in range(microbatches)]
        return tuple([float(round(time)) for time in times] if is_whole else times)

    scale = {Kind.F: 1.0, Kind.B: 1.5, Kind.W: 0.7}
    return {kind: tuple([row(speed * scale[kind]) for speed in speeds]) for kind in Kind}


def _latencies(rng: random.Random, count: int, microbatches: int) -> dict[Kind, Rows]:
    base, jitter = rng.choice([0.0, 0.1, 1.0]), rng.choice([0.0, 1.0, 5.0])
    return {
        kind: tuple([tuple([base + jitter * rng.random() ** 3 for _ in range(microbatches)]) for _ in range(count)])
        for kind in (Kind.F, Kind.B)
    }


def _gates(
    rng: random.Random, graph: Graph, microbatches: int, *, may_wait: bool
) -> tuple[tuple[Limit, ...], frozenset[ForcedOrder]]:
    """What may keep a task out although its inputs are there: limits and forced orders."""
    limits, in_order = _limits(rng, graph, microbatches), _in_order(rng, graph)
    if may_wait:  # a hint that waits for one task must never find it blocked
        return (Limit(),) * graph.placement.stages, frozenset()
    return limits, frozenset() if limits[0].rule == "paper" else in_order  # the paper knows no forced order


def _in_order(rng: random.Random, graph: Graph) -> frozenset[ForcedOrder]:
    """At times one kind runs in microbatch order, on most virtual stages.

    Often enough for 600 runs to show that the reserve rule is missing: that takes a small limit and bad luck as well.
    """
    if rng.random() >= 0.4:
        return frozenset()
    kind = rng.choice([*Kind])
    return frozenset([(kind, v) for v in range(graph.placement.num_virtual_stages) if rng.random() < 0.8])


def _limits(rng: random.Random, graph: Graph, microbatches: int) -> tuple[Limit, ...]:
    stages = graph.placement.stages
    spec = rng.choice(["1f1b", "1f1b", "2n", None, 1, rng.randint(1, microbatches + 1), "paper", "own"])
    if spec == "paper":
        return (Limit(rng.randint(1, microbatches), rule="paper"),) * stages
    if spec == "own":
        return tuple([Limit(rng.randint(1, microbatches + 1)) for _ in range(stages)])
    return tuple([Limit.resolve(spec, stage, stages) for stage in range(stages)])


@functools.cache
def _methods() -> tuple[str, ...]:
    """Every registered hint, a random one, and every schedule to the letter."""
    return (*hint_names(), _RANDOM, _RANDOM, *(f"{_STRICT}{name}" for name in schedule_names()))


def _method(rng: random.Random, graph: Graph, steps: Sequence[StepId]) -> tuple[str, Callable[[int], Hint]]:
    """One that fits the pipeline. A schedule is for one chunk a stage, or for several, and so on."""
    methods = _methods()
    name = next(name for name in rng.sample(methods, len(methods)) if _fits(name, graph, steps))
    if name == _RANDOM:
        seeds = [rng.randrange(2**32) for _ in range(graph.placement.stages)]
        return name, lambda stage: AnyReady(seeds[stage])
    if name.startswith(_STRICT):
        return name, lambda stage: create_strict(name.removeprefix(_STRICT))
    return name, lambda stage: create_hint(name)


def _fits(name: str, graph: Graph, steps: Sequence[StepId]) -> bool:
    schedule = name.removeprefix(_STRICT)
    if schedule not in schedule_names():
        return True
    try:
        for step in steps:
            make_schedule(schedule, graph, step.microbatches)
    except ConfigError:
        return False
    return True


def _horizon(
    graph: Graph, steps: Sequence[StepId], durations: Mapping[Kind, Rows], latencies: Mapping[Kind, Rows]
) -> float:
    """About how long the run takes, so that faults fall into it."""
    microbatches = max(step.microbatches for step in steps)
    each = sum(sum(row) for rows in durations.values() for row in rows) / microbatches
    latency = sum(sum(row) for rows in latencies.values() for row in rows) / microbatches
    rounds = sum(step.microbatches / graph.placement.stages + 1 for step in steps)
    return 0.6 * (rounds * each + len(steps) * latency)
