"""Hints with a fixed order of kinds (paper, section 4): B-priority and F-priority."""

from __future__ import annotations

from rrfp.core.hint import View
from rrfp.core.ready_set import ReadySet
from rrfp.hints.run_ahead import EncoderAware
from rrfp.model.tasks import Kind, Task


class FixedPriority(EncoderAware):
    """Chooses the first kind of ``order`` that has a ready task."""

    order: tuple[Kind, Kind, Kind]

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        """See `rrfp.core.hint.Hint.choose`."""
        for kind in self.order:
            if (task := self.first(kind, ready, view)) is not None:
                return task
        return self.last_resort(ready, view)


class BackwardPriority(FixedPriority):
    """B-priority: any ready backward before any forward; weight tasks when neither is ready."""

    order = (Kind.B, Kind.F, Kind.W)


class ForwardPriority(FixedPriority):
    """F-priority: any ready forward before any backward; weight tasks when neither is ready."""

    order = (Kind.F, Kind.B, Kind.W)
