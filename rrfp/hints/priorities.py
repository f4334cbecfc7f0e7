"""Hints that rank kinds of tasks: in a fixed order, or alternating as in the paper (Algorithm 1, section 4)."""

from __future__ import annotations

from rrfp.core.hint import View
from rrfp.core.ready_set import ReadySet
from rrfp.hints.run_ahead import EncoderAware
from rrfp.model.tasks import B, F, Kind, Task


class FixedPriority(EncoderAware):
    """Chooses the first kind of ``order`` that has a ready task, and others where neither has."""

    order: tuple[Kind, Kind]

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        for kind in self.order:
            if (task := self.first(kind, ready, view)) is not None:
                return task
        return self.otherwise(ready, view)


class BackwardPriority(FixedPriority):
    """B-priority: any ready backward before any forward; weight tasks when neither is ready."""

    order = (B, F)


class ForwardPriority(FixedPriority):
    """F-priority: any ready forward before any backward; weight tasks when neither is ready."""

    order = (F, B)


class Alternating(EncoderAware):
    """Backward and forward alternate in priority; weight tasks run if neither is ready."""

    def _pick(self, ready: ReadySet, view: View, first: Kind, second: Kind) -> Task | None:
        return self.first(first, ready, view) or self.first(second, ready, view) or self.otherwise(ready, view)


class BackwardForward(Alternating):
    """BF: after a backward, forwards come first; otherwise, and at the start, backwards do.

    If no task of that kind is ready, the other kind runs. Only an enqueued task changes the priority, waiting does not.
    """

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        if view.last_kind is B:
            return self._pick(ready, view, F, B)
        return self._pick(ready, view, B, F)


class ForwardBackward(Alternating):
    """FB: after a forward, backwards come first; otherwise, and at the start, forwards do."""

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        if view.last_kind is F:
            return self._pick(ready, view, B, F)
        return self._pick(ready, view, F, B)


class BackwardForwardWeight(BackwardForward):
    """BFW: BF, and a weight task if neither a backward nor a forward is ready; after it backwards have priority.

    Why no code of its own? BF does this once backward is split: weight tasks come last in its order, and only after a
    backward do forwards have priority. On unsplit stages it is BF.
    """

    wants_split = True
