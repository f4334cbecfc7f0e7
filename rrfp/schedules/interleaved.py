"""Interleaved 1F1B: 1F1B over looped chunks, in groups of N microbatches (Narayanan et al., Megatron-LM, 2021).

Forwards go group by group: N microbatches through chunk 0, the same N through chunk 1, and so on to the last chunk;
backwards likewise, from the last chunk to the first. Stage i warms up with 2 (N - 1 - i) + (C - 1) N forwards, then
alternates. With one chunk that would be twice 1F1B's warm-up without gain, so it then is 1F1B's own, N - 1 - i.

The published schedule takes M in multiples of N. Here the last group may be shorter: see `rrfp.schedules.slots`.
"""

from __future__ import annotations

from rrfp.core.graph import Graph
from rrfp.core.schedule import Schedule
from rrfp.core.tasks import Kind
from rrfp.schedules.needs import Needs
from rrfp.schedules.slots import Slot, fill

NEEDS = Needs(layout="looped")


def interleaved_1f1b(graph: Graph, microbatches: int) -> Schedule:
    """Stage i holds at most 2 (N - 1 - i) + (C - 1) N + 1 chunk tasks; N - i with one chunk. Any M >= 1.

    With equal stages and no latency the lanes idle (N - 1) (F + B) / C in all when M is a multiple of N, F and B being
    the times of a whole stage.
    """
    stages, chunks = graph.placement.stages, graph.placement.chunks
    groups = -(-microbatches // stages)
    forwards = [(Kind.F, chunk) for chunk in range(chunks) for _ in range(stages)] * groups
    backwards = [(Kind.B, chunk) for chunk in reversed(range(chunks)) for _ in range(stages)] * groups
    orders = []
    for stage in range(stages):
        after = stages - 1 - stage
        warm_up = after if chunks == 1 else min(2 * after + (chunks - 1) * stages, len(forwards))
        orders.append(fill(_alternating(forwards, backwards, warm_up), graph, stage, microbatches))
    return Schedule("interleaved-1f1b", tuple(orders))


def _alternating(forwards: list[Slot], backwards: list[Slot], warm_up: int) -> list[Slot]:
    """``warm_up`` forwards, then a forward and a backward in turn, then the other backwards."""
    steady = len(forwards) - warm_up
    pairs = zip(forwards[warm_up:], backwards[:steady], strict=True)
    return [*forwards[:warm_up], *(slot for pair in pairs for slot in pair), *backwards[steady:]]
