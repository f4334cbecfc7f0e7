"""One run with faults as data: a small pipeline, how it is scheduled, its steps, their times, and its faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from rrfp.core.events import Arrived, Pool
from rrfp.core.hint import Hint
from rrfp.core.ready_set import ForcedOrder
from rrfp.lab.cluster.coordination import CoordinationName
from rrfp.lab.cluster.ranks import Rank, ranks_of
from rrfp.lab.faults.faults import Fault
from rrfp.memory.admission import Limit
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import Placement, TablePlacement
from rrfp.model.tasks import Kind, Mode, StepId, Task
from rrfp.model.visits import Visits

#: For each virtual stage, a number of seconds for each microbatch.
Rows = tuple[tuple[float, ...], ...]

_HOW: dict[CoordinationName, str] = {"leader": "a leader", "agreement": "agreement"}


@dataclass(frozen=True, slots=True)
class Parallelism:
    """How many ranks a stage has, and how they work together."""

    #: Copies of the pipeline.
    replicas: int = 1
    #: Ranks of a group.
    members: int = 1
    #: How a group agrees on an order: a leader's log, or proposals until all agree.
    coordination: CoordinationName = "leader"
    #: a task ends on no member before all have begun it, as with collectives inside.
    coupled: bool = True
    #: By member, what a microbatch holds on a chunk from its forward to its last task.
    bytes_held: tuple[int, ...] = (0,)
    #: Outputs reach the members of a group up to so many seconds apart.
    jitter: float = 0.0

    def lag(self, step: int, microbatch: int, virtual_stage: int, member: int) -> float:
        """Seconds that an output may reach a member late."""
        return self.jitter * (hash((step, microbatch, virtual_stage, member)) % 997) / 997 if self.jitter else 0.0

    @property
    def is_led(self) -> bool:
        return self.members > 1 and self.coordination == "leader"

    @property
    def agrees(self) -> bool:
        return self.members > 1 and self.coordination == "agreement"

    def describe(self) -> list[str]:
        """What differs from one rank a stage, in words."""
        parts = []
        if self.replicas > 1:
            parts.append(f"{self.replicas} replicas")
        if self.members > 1:
            pace = "which meet in each task" if self.coupled else "each at its own pace"
            parts.append(f"groups of {self.members} under {_HOW[self.coordination]}, {pace}")
        if any(self.bytes_held):
            parts.append(f"a microbatch holds {' and '.join(map(str, self.bytes_held))} bytes a chunk")
        return parts


@dataclass(frozen=True, slots=True)
class SharedForwards:
    """How replicas share the forwards of training steps."""

    #: By step and microbatch, the replica whose caller has it.
    homes: tuple[tuple[int, ...], ...]
    #: Forwards that a rank has claimed and not begun, at most.
    depth: int = 1
    #: By stage and copy, how many times longer its tasks take than is drawn.
    paces: Rows = ()
    #: Whether ranks know their paces.
    are_known: bool = False
    #: By microbatch, what it holds on a chunk from its forward to its last task; empty: nothing.
    bytes_held: tuple[int, ...] = ()
    #: Whether they keep their first microbatch.
    is_even: bool = False

    def describe(self) -> list[str]:
        """How they do, in words."""
        slow = [f"stage {s} replica {c} {pace:g}" for s, row in enumerate(self.paces) for c, pace in enumerate(row)]
        times = [text for text in slow if not text.endswith(" 1")]
        parts = [f"replicas share forwards, of which a rank claims {self.depth} ahead"]
        if self.is_even:
            parts[0] += ", but for the first microbatch of each"
        if times:
            parts.append(f"times slower{', as all know' if self.are_known else ''}: {', '.join(times)}")
        if self.bytes_held:
            parts.append(f"microbatches hold {' '.join(map(str, self.bytes_held))} bytes a chunk")
        return parts


@dataclass(frozen=True)
class Scenario:
    """One run. Times are in seconds."""

    seed: int
    graph: TaskGraph
    #: How it is scheduled, in words: "bf", "random", "strict 1f1b".
    method: str
    make_hint: Callable[[int], Hint]
    limits: tuple[Limit, ...]
    #: (kind, virtual stage) pairs that run in microbatch order.
    in_order: frozenset[ForcedOrder]
    #: Tasks enqueued and not complete, at most, a stage.
    depth: int
    steps: tuple[StepId, ...]
    #: Of the microbatches, where hints receive them.
    sizes: tuple[float, ...] | None
    #: Of a task, by kind, virtual stage and microbatch.
    durations: Mapping[Kind, Rows]
    #: Of an output, by kind, virtual stage and microbatch of its task.
    latencies: Mapping[Kind, Rows]
    #: Of credits, and of the report that a rank failed, for each stage that it passes.
    control_latency: float
    #: From the start of a send until its memory is free.
    release_after: float
    #: For each stage, from the end of one step to the beginning of the next.
    gaps: tuple[float, ...]
    faults: tuple[Fault, ...]
    #: The ranks of a stage, and how they work together; one by default.
    parallelism: Parallelism = Parallelism()
    #: Lanes take offered tasks: see `rrfp.arbiter.offers`.
    takes_offers: bool = False
    #: What microbatches visit, in every step; None: all visit everything. There is one step otherwise: ranks
    #: that have nothing in common in a step may be any number of steps apart.
    visits: Visits | None = None
    #: How replicas share forwards; None: they do not.
    shared: SharedForwards | None = None

    def pool_of(self, step: StepId, rank: Rank) -> Pool | None:
        """How the copies of the stage of ``rank`` share the forwards of ``step``, if they do."""
        shared = self.shared
        if shared is None or step.mode is not Mode.TRAIN:
            return None
        paces = shared.paces[rank.stage] if shared.are_known else ()
        homes = shared.homes[step.number]
        return Pool(rank.replica, self.parallelism.replicas, homes, shared.depth, paces, shared.is_even)

    def salts_of(self, step: StepId, rank: Rank) -> tuple[int, ...]:
        """By microbatch, what tells its values on ``rank`` from those of other replicas and shards."""
        pool = self.pool_of(step, rank)
        return (rank.salt,) * step.microbatches if pool is None else tuple(map(rank.salt_in, pool.homes))

    def seconds(self, rank: Rank, task: Task) -> float:
        pace = self.shared.paces[rank.stage][rank.replica] if self.shared is not None else 1.0
        return pace * self.durations[task.kind][task.virtual_stage][task.microbatch]

    def bytes_held(self, rank: Rank, microbatch: int) -> int:
        """What ``microbatch`` holds on a chunk of ``rank`` from its forward to its last task."""
        own = () if self.shared is None else self.shared.bytes_held
        return own[microbatch] if own else self.parallelism.bytes_held[rank.member]

    @property
    def most_held(self) -> int:
        """The most bytes that a microbatch holds on a chunk of any rank."""
        return max(self.parallelism.bytes_held if self.shared is None else self.shared.bytes_held, default=0)

    def visits_of(self, step: StepId) -> Visits:
        return Visits(step.microbatches) if self.visits is None else self.visits

    def _pipeline(self) -> Iterator[str]:
        graph, placement = self.graph, self.graph.placement
        if isinstance(placement, Placement):
            chunks = "" if placement.chunks == 1 else f" x {placement.chunks} chunks ({placement.layout})"
        else:
            chunks = f" with virtual stages {' | '.join(_on_each_stage(placement))}"
        yield f"{placement.stages} stage(s){chunks}"
        yield f"{sum(graph.split)} of {placement.num_virtual_stages} virtual stages split"
        edges = [f"{u}->{v}" for u, v in graph.edges or () if v != u + 1 or not graph.is_chain]
        if edges:
            yield f"{'skip edges' if graph.is_chain else 'edges'} {' '.join(edges)}"
        for m, skipped in enumerate(() if self.visits is None else self.visits.skipped):
            if skipped:
                yield f"microbatch {m} skips {' '.join(map(str, sorted(skipped)))}"

    def describe(self) -> list[str]:
        """The run in lines of text, one a fault."""
        forced = " ".join(f"{kind}@{v}" for kind, v in sorted(self.in_order))
        limits = " ".join("-" if limit.microbatches is None else str(limit.microbatches) for limit in self.limits)
        parallelism = self.parallelism.describe() + ([] if self.shared is None else self.shared.describe())
        return [
            f"pipeline: {', '.join(self._pipeline())}",
            *([f"ranks: {'; '.join(parallelism)}"] if parallelism else []),
            f"schedule: {self.method}, limits by stage: {limits} ({self._rule}), depth {self.depth}"
            f"{', tasks are offered' if self.takes_offers else ''}",
            *([f"in microbatch order: {forced}"] if forced else []),
            f"steps: {'; '.join(f'{step.mode}, {step.microbatches} microbatches' for step in self.steps)}",
            *[f"fault: {fault}" for fault in self.faults],
        ]

    @property
    def ranks(self) -> tuple[Rank, ...]:
        return ranks_of(self.graph.placement.stages, self.parallelism.replicas, self.parallelism.members)

    def latency(self, output: Arrived, member: int) -> float:
        kind, microbatch, virtual_stage = output.task
        lag = self.parallelism.lag(output.step.number, microbatch, virtual_stage, member)
        return self.latencies[kind][virtual_stage][microbatch] + lag

    @property
    def _rule(self) -> str:
        first = self.limits[0]
        return first.rule if first.bytes is None else f"{first.rule}, {first.bytes} bytes"


def _on_each_stage(placement: TablePlacement) -> Iterator[str]:
    for stage in range(placement.stages):
        yield " ".join(map(str, placement.virtual_stages(stage)))
