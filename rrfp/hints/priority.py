"""Hints with a fixed order of kinds (paper, section 4): B-priority and F-priority."""

from __future__ import annotations

from rrfp.core.hint import Hint, View
from rrfp.core.ready_set import ChunkOrder, ReadySet
from rrfp.core.tasks import Kind, Task


class FixedPriority(Hint):
    """Chooses the first kind of ``order`` that has a ready task.

    Args:
        chunk_order: the chunk whose forwards come first.
    """

    order: tuple[Kind, Kind, Kind]

    def __init__(self, chunk_order: ChunkOrder = "deeper") -> None:
        self.chunk_order: ChunkOrder = chunk_order

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        """See `rrfp.core.hint.Hint.choose`."""
        for kind in self.order:
            if (task := ready.first(kind, self.chunk_order)) is not None:
                return task
        return None


class BackwardPriority(FixedPriority):
    """B-priority: any ready backward before any forward; weight tasks when neither is ready."""

    order = (Kind.B, Kind.F, Kind.W)


class ForwardPriority(FixedPriority):
    """F-priority: any ready forward before any backward; weight tasks when neither is ready."""

    order = (Kind.F, Kind.B, Kind.W)
