"""Cases for the explorer: every combination of what a caller lists, each with the bound that its rule promises.

Combinations that say nothing are left out: a V of one chunk, the paper's rule of one chunk (it is the staircase there),
a split or a forced B in a forward-only step, a forced W without W, and a limit above M, which never binds.

docs/memory-rules.md proves the bounds.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Generic, Literal, Protocol, TypeVar

from rrfp.core.ready_set import ForcedOrder, natural_order
from rrfp.lab.explore.search import Exploration, Oracles, explore
from rrfp.memory.admission import DEFAULT_RULE, OFFERED_RULES, RULES, Limit
from rrfp.memory.rules import MemoryRule, Reserve, Staircase
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import Layout, Placement
from rrfp.model.tasks import Kind, Mode
from rrfp.model.visits import Visits


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds by stage, in chunk tasks or inputs."""

    # Every count of inputs is bounded by M*C as well.

    #: The bound on D.
    held: tuple[int, ...]
    #: Of inputs from other stages that no task here has started to use up.
    received: tuple[int, ...]
    #: Of forward inputs from other stages, kept until their backward (forward only: their forward) has run.
    buffered: tuple[int, ...]


#: What docs/memory-rules.md proves of rules whose bounds are not the staircase's, with several chunks in training: by
#: how many chunks D may pass K*C, and the slots below K*C from which no microbatch begins. Stated here once more, since
#: what a rule says of itself would prove nothing.
_PROVED = {"paper": (1, -1)}


def bounds_of(placement: Placement, limits: Sequence[int], mode: Mode, rule: str) -> Bounds:
    chunks = placement.chunks
    staircase = (0, chunks - 1)
    excess, kept = _PROVED.get(rule, staircase) if chunks > 1 and mode is Mode.TRAIN else staircase
    held = tuple((limit + excess) * chunks for limit in limits)
    feeders = [_feeders(placement, stage) for stage in range(placement.stages)]
    buffered = tuple(sum(held[feeder] for feeder in sources) for sources in feeders)
    if mode is Mode.FORWARD:
        return Bounds(held, buffered, buffered)
    # A microbatch waits for one task at a time, and it holds the first chunk of every stage before this one.
    begun = [limit * chunks - kept for limit in limits]
    received = tuple(min(begun[: max(stage, 1)]) for stage in range(placement.stages))
    return Bounds(held, received, buffered)


def _feeders(placement: Placement, stage: int) -> set[int]:
    return {placement.stage_of(v - 1) for v in placement.virtual_stages(stage) if v} - {stage}


# Memory rules that deadlock, so that the explorer can show how. Each differs from one that ships only in how many slots
# a forward leaves free when it starts; docs/memory-rules.md has what each deadlocks on.


class BackwardDrain(MemoryRule):
    """Any forward while D < K*C, only backwards from there on: the paper's rule for C = 1, wrong for C > 1.

    This is what remains of the staircase when no slot is kept for the deeper chunks.
    """

    __slots__ = ()


class LastSlotReserved(Reserve):
    """The staircase with one reserved slot, the last: right for C = 1 in a forced order, wrong for C > 1."""

    __slots__ = ()

    def kept_free(self, chunk: int, *, is_lowest: bool) -> int:
        """What the staircase keeps, and the last slot for the lowest microbatch."""
        staircase = self._chunks - 1 - chunk
        return staircase if is_lowest else max(staircase, 1)


class StepReserved(Reserve):
    """The staircase with one reserved slot on each of its steps; in a forced order wrong for C > 1 as well."""

    __slots__ = ()

    def kept_free(self, chunk: int, *, is_lowest: bool) -> int:
        """The staircase's, and one slot for the chunk's lowest microbatch."""
        staircase = self._chunks - 1 - chunk
        return staircase if is_lowest else staircase + 1


#: Those known to be wrong, by name. The staircase is wrong in a forced order without the reserve rule.
WRONG_RULES: Mapping[str, type[MemoryRule]] = {
    "backward-drain": BackwardDrain,
    "unreserved": Staircase,
    "last-slot": LastSlotReserved,
    "step-slot": StepReserved,
}
#: The names of all: those that a limit may ask for, then those known to be wrong.
RULE_NAMES = (*OFFERED_RULES, *WRONG_RULES)

#: Whether virtual stages split their backward: none, all, or those of even number.
Backward = Literal["whole", "split", "mixed"]
#: What runs in microbatch order: one kind, or "natural", every kind.
InOrder = Kind | Literal["natural"]
#: Which virtual stages run a kind in microbatch order: all, the last, or the middle one.
Where = Literal["all", "last", "middle"]


class Explorable(Protocol):
    """What can be explored, such as a `ChainCase`."""

    @property
    def graph(self) -> TaskGraph:
        """The dependency graph."""

    @property
    def microbatches(self) -> int:
        """M."""

    @property
    def mode(self) -> Mode:
        """Training or forward only."""

    @property
    def bounds(self) -> Bounds:
        """What the rule promises."""

    def explore(self, *, reduce: bool | None = None, oracles: Oracles | None = None) -> Exploration: ...


CaseT_co = TypeVar("CaseT_co", bound=Explorable, covariant=True)


@dataclass(frozen=True, slots=True)
class ChainCase:
    """One pipeline under one rule."""

    stages: int
    microbatches: int
    chunks: int = 1
    layout: Layout = "looped"
    backward: Backward = "whole"
    mode: Mode = Mode.TRAIN
    #: K, or ``"1f1b"``.
    limit: int | Literal["1f1b"] = 1
    #: One of `RULE_NAMES`.
    rule: str = DEFAULT_RULE
    #: What runs in microbatch order, or None.
    in_order: InOrder | None = None
    #: On which virtual stages it does.
    where: Where = "all"

    @property
    def placement(self) -> Placement:
        return Placement(self.stages, self.chunks, self.layout)

    @property
    def graph(self) -> TaskGraph:
        all_of_them = range(self.placement.num_virtual_stages)
        return TaskGraph(
            self.placement, split=tuple(self.backward == "split" or self._is_mixed_in(v) for v in all_of_them)
        )

    def _is_mixed_in(self, virtual_stage: int) -> bool:
        return self.backward == "mixed" and virtual_stage % 2 == 0

    @property
    def limits(self) -> list[Limit]:
        rule = self.rule if self.rule in OFFERED_RULES else DEFAULT_RULE
        return [replace(Limit.resolve(self.limit, stage, self.stages), rule=rule) for stage in range(self.stages)]

    @property
    def forced(self) -> list[ForcedOrder]:
        if self.in_order is None:
            return []
        graph, count = self.graph, self.stages * self.chunks
        if self.in_order == "natural":
            return [(kind, v) for kind, v in natural_order(graph) if kind in graph.kinds(v, self.mode)]
        where = {"all": range(count), "last": [count - 1], "middle": [(count - 1) // 2]}[self.where]
        return [(self.in_order, v) for v in where if self.in_order in graph.kinds(v, self.mode)]

    @property
    def bounds(self) -> Bounds:
        """What its rule promises; docs/memory-rules.md says why."""
        return bounds_of(self.placement, [limit.microbatches or 0 for limit in self.limits], self.mode, self.rule)

    @property
    def is_reduced(self) -> bool:
        """Whether leaving out orders saves more than its searches repeat."""
        drains = self.rule in OFFERED_RULES and RULES[self.rule].drains_in_order
        return not drains or self.backward != "whole"

    def explore(self, *, reduce: bool | None = None, oracles: Oracles | None = None) -> Exploration:
        """Explore it; arguments as of `rrfp.lab.explore.search.explore`, ``reduce`` as `is_reduced` says where None."""
        return explore(
            self.graph,
            self.microbatches,
            self.limits,
            self.mode,
            in_order=self.forced,
            admission=WRONG_RULES.get(self.rule),
            reduce=self.is_reduced if reduce is None else reduce,
            oracles=oracles,
        )

    def __str__(self) -> str:
        shape = f"N={self.stages} M={self.microbatches} C={self.chunks}"
        layout = f" {self.layout}" if self.chunks > 1 else ""
        backward = f", {self.backward} backward" if self.mode is Mode.TRAIN else ", forward only"
        order = {None: "", "natural": ", natural order"}.get(
            self.in_order, f", {self.in_order} in order ({self.where})"
        )
        return f"{shape}{layout}{backward}, limit {self.limit}, {self.rule}{order}"


@dataclass(frozen=True, slots=True)
class Explored(Generic[CaseT_co]):
    """One case and its exploration."""

    case: CaseT_co
    exploration: Exploration
    #: Processor time that this took.
    seconds: float

    @property
    def broken(self) -> tuple[str, ...]:
        """The bounds that were passed on some stage, in words."""
        bounds, exploration = self.case.bounds, self.exploration
        pairs = {
            "D": (exploration.peak_held, bounds.held),
            "received inputs": (exploration.peak_received, bounds.received),
            "buffered inputs": (exploration.peak_buffered, bounds.buffered),
        }
        return tuple(
            f"{name} reached {seen} on stage {stage}, bound {most}"
            for name, (peaks, mosts) in pairs.items()
            for stage, (seen, most) in enumerate(zip(peaks, mosts, strict=True))
            if seen > most
        )

    @property
    def is_safe(self) -> bool:
        """No deadlock, and every bound kept."""
        return not self.exploration.deadlocks and not self.broken


@dataclass(frozen=True, slots=True)
class Grid:
    """Lists of values; every sensible combination is a `ChainCase`."""

    stages: Sequence[int] = (1, 2, 3, 4)
    microbatches: Sequence[int] = (1, 2, 3, 4)
    chunks: Sequence[int] = (1, 2)
    layouts: Sequence[Layout] = ("looped", "v")
    backwards: Sequence[Backward] = ("whole", "split", "mixed")
    modes: Sequence[Mode] = (Mode.TRAIN, Mode.FORWARD)
    limits: Sequence[int | Literal["1f1b"]] = (1, 2, 3, 4, "1f1b")
    rules: Sequence[str] = OFFERED_RULES
    #: What runs in microbatch order; None for no forced order.
    in_order: Sequence[InOrder | None] = (None,)
    where: Sequence[Where] = ("all", "last", "middle")

    def __iter__(self) -> Iterator[ChainCase]:
        shapes = product(self.stages, self.microbatches, self.chunks, self.layouts)
        rest = list(product(self.backwards, self.modes, self.limits, self.rules, self.in_order, self.where))
        for (stages, microbatches, chunks, layout), (backward, mode, limit, rule, kind, where) in product(shapes, rest):
            case = ChainCase(stages, microbatches, chunks, layout, backward, mode, limit, rule, kind, where)
            if self._says_something(case):
                yield case

    def _says_something(self, case: ChainCase) -> bool:
        is_staircase = case.rule in _PROVED and len(self.rules) > 1
        if case.chunks == 1 and (case.layout != self.layouts[0] or is_staircase):
            return False
        if case.mode is Mode.FORWARD and case.backward != self.backwards[0]:
            return False
        if isinstance(case.limit, int) and case.limit > case.microbatches:
            return False
        if case.in_order is None or case.in_order == "natural":
            return case.where == self.where[0]
        return bool(case.forced)


def explored(cases: Iterable[CaseT_co], *, reduce: bool | None = None) -> Iterator[Explored[CaseT_co]]:
    """Explore each case as `ChainCase.explore` does, and time it.

    Cases of one pipeline that follow each other share the answers of the stages that they have in common, such as
    those of stage 1 for limit 2 and for 1f1b on three stages.
    """
    oracles: Oracles = {}
    shape = None
    for case in cases:
        if shape != (shape := (case.graph, case.microbatches, case.mode)):
            oracles = {}
        start = time.process_time()
        exploration = case.explore(reduce=reduce, oracles=oracles)
        yield Explored(case, exploration, time.process_time() - start)


def random_visits(count: int, microbatches: int, rng: random.Random, share: float = 0.3) -> Visits:
    """Each microbatch skips some of ``count`` virtual stages by chance."""
    skipped = [frozenset(v for v in range(count) if rng.random() < share) for _ in range(microbatches)]
    return Visits(microbatches, tuple(skipped))
