"""The memory that each rule promises, for chains and for any graph; docs/memory-rules.md has the proofs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rrfp.model.graph import TaskGraph
from rrfp.model.placement import Placement
from rrfp.model.tasks import Mode


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


def bounds_of(placement: Placement, limits: Sequence[int], mode: Mode, rule: str) -> Bounds:
    """The bounds for a chain."""
    chunks = placement.chunks
    serves = rule == "paper" and chunks > 1 and mode is Mode.TRAIN
    held = tuple(limit * chunks + (chunks if serves else 0) for limit in limits)
    feeders = [_feeders(placement, stage) for stage in range(placement.stages)]
    buffered = tuple(sum(held[feeder] for feeder in sources) for sources in feeders)
    if mode is Mode.FORWARD:
        return Bounds(held, buffered, buffered)
    # A microbatch waits for one task at a time, and it holds the first chunk of every stage before this one.
    begun = [limit * chunks + 1 if serves else limit * chunks - (chunks - 1) for limit in limits]
    received = tuple(min(begun[: max(stage, 1)]) for stage in range(placement.stages))
    return Bounds(held, received, buffered)


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


def _feeders(placement: Placement, stage: int) -> set[int]:
    """The other stages whose forwards this one reads."""
    return {placement.stage_of(v - 1) for v in placement.virtual_stages(stage) if v} - {stage}
