"""Cases of pipelines that need not be chains: every small graph, on every placement.

Limits count the slots of each stage, from the fewest that are legal: those that one microbatch takes there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product

from rrfp.core.ready_set import ForcedOrder
from rrfp.lab.explore.cases import Bounds
from rrfp.lab.explore.search import Exploration, Oracles, explore
from rrfp.memory.admission import RULES, Limit
from rrfp.memory.rules import MemoryRule, Reserve, Staircase
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import TablePlacement
from rrfp.model.tasks import Kind, Mode
from rrfp.model.visits import Visits

#: The rules by name. "hybrid" is what ships, "banker" its one half on every stage, and "staircase" the other, with the
#: reserve rule where an order is forced: that one is wrong where branches join.
GRAPH_RULES = ("hybrid", "banker", "staircase")


@dataclass(frozen=True, slots=True)
class SlotLimit(Limit):
    """A limit on the chunk tasks of a stage, whatever its chunks."""

    #: The slots, at least 1.
    chunk_tasks: int = 1

    def slots(self, chunks: int) -> int:
        return self.chunk_tasks


@dataclass(frozen=True, slots=True)
class GraphCase:
    """One pipeline under one rule."""

    #: The stage of each virtual stage.
    table: tuple[int, ...]
    #: Pairs (u, v), u < v: v reads u.
    edges: tuple[tuple[int, int], ...]
    microbatches: int
    #: Of each stage, in chunk tasks.
    slots: tuple[int, ...]
    #: What each microbatch visits; None: everything.
    visits: Visits | None = None
    is_split: bool = False
    #: Training or forward only.
    mode: Mode = Mode.TRAIN
    #: a name of `GRAPH_RULES`.
    rule: str = "hybrid"
    in_order: tuple[ForcedOrder, ...] = ()

    @property
    def graph(self) -> TaskGraph:
        return TaskGraph(TablePlacement(self.table), self.edges, (self.is_split,) * len(self.table))

    @property
    def bounds(self) -> Bounds:
        """What every rule promises; docs/memory-rules.md says why."""
        return graph_bounds_of(self.graph, self.slots, self.mode)

    @property
    def _admission(self) -> type[MemoryRule] | None:
        halves = {"banker": RULES["banker"], "staircase": Reserve if self.in_order else Staircase}
        return halves.get(self.rule)

    def explore(self, *, reduce: bool | None = None, oracles: Oracles | None = None) -> Exploration:
        """Explore it; arguments as of `rrfp.lab.explore.search.explore`."""
        return explore(
            self.graph,
            self.microbatches,
            [SlotLimit(chunk_tasks=slots) for slots in self.slots],
            self.mode,
            in_order=self.in_order,
            admission=self._admission,
            visits=self.visits,
            reduce=reduce is not False,
            oracles=oracles,
        )

    def __str__(self) -> str:
        edges = " ".join(f"{u}->{v}" for u, v in self.edges) or "no edges"
        skips = enumerate(self.visits.skipped if self.visits else ())
        skipped = [f"{m} skips {' '.join(map(str, sorted(vs)))}" for m, vs in skips if vs]
        step = "forward only" if self.mode is Mode.FORWARD else "split backward" if self.is_split else "whole backward"
        order = [f"{kind}@{v}" for kind, v in self.in_order]
        parts = [
            f"{edges} on stages {' '.join(map(str, self.table))}",
            f"M={self.microbatches}, {step}, slots {' '.join(map(str, self.slots))}, {self.rule}",
            *skipped,
            *([f"in order {' '.join(order)}"] if order else []),
        ]
        return ", ".join(parts)


def graphs_of(count: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """The edges of every acyclic graph of ``count`` virtual stages."""
    pairs = list(combinations(range(count), 2))
    for kept in product((False, True), repeat=len(pairs)):
        yield tuple(pair for pair, is_kept in zip(pairs, kept, strict=True) if is_kept)


def tables_of(count: int) -> Iterator[tuple[int, ...]]:
    """Every placement of virtual stages, up to the stages' numbers."""
    for table in product(range(count), repeat=count):
        if all(stage <= max(table[:v], default=-1) + 1 for v, stage in enumerate(table)):
            yield table


def slots_of(
    table: Sequence[int],
    microbatches: int,
    visits: Visits | None = None,
    # So many slots above the fewest at most; None: no bound.
    most_spare: int | None = None,
) -> Iterator[tuple[int, ...]]:
    """Every limit, from the fewest slots of one microbatch upwards."""
    choices = []
    for stage in range(max(table) + 1):
        here = {v for v, at in enumerate(table) if at == stage}
        taken = [len(here - (visits.skipped_by(m) if visits else frozenset())) for m in range(microbatches)]
        fewest, most = max(1, *taken), max(1, sum(taken))
        spare = most - fewest if most_spare is None else min(most_spare, most - fewest)
        choices.append(range(fewest, fewest + spare + 1))
    yield from product(*choices)


def graph_bounds_of(graph: TaskGraph, slots: Sequence[int], mode: Mode) -> Bounds:
    """The bounds for any graph under the rule that ships, never the paper's."""
    stage_of, stages = graph.stage_of, range(graph.placement.stages)
    assert graph.edges is not None
    crossing = [(u, v) for u, v in graph.edges if stage_of[u] != stage_of[v]]
    feeders = [{stage_of[u] for u, v in crossing if stage_of[v] == stage} for stage in stages]
    buffered = tuple(sum(slots[feeder] for feeder in sources) for sources in feeders)
    if mode is Mode.FORWARD:
        return Bounds(tuple(slots), buffered, buffered)
    # A gradient that waits belongs to a microbatch that holds a slot here, on a chunk with so many readers elsewhere.
    readers = [max(sum(u == v for u, _ in crossing) for v in graph.placement.virtual_stages(s)) for s in stages]
    gradients = [most * count for most, count in zip(slots, readers, strict=True)]
    return Bounds(tuple(slots), tuple(map(sum, zip(buffered, gradients, strict=True))), buffered)


def everywhere(kind: Kind, count: int) -> tuple[ForcedOrder, ...]:
    """``kind`` in microbatch order on all of ``count`` virtual stages."""
    return tuple((kind, v) for v in range(count))
