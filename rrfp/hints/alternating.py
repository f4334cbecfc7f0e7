"""The alternating hints BF (the paper's Algorithm 1 and default) and FB (section 4)."""

from __future__ import annotations

from rrfp.core.hint import Hint, View
from rrfp.core.ready_set import ChunkOrder, ReadySet
from rrfp.core.tasks import B, F, Kind, Task, W


class Alternating(Hint):
    """Backward and forward alternate in priority; weight tasks run if neither is ready.

    Args:
        chunk_order: the chunk whose forwards come first: ``"deeper"``, or ``"paper"`` for Algorithm 1's shallower
            first.
    """

    def __init__(self, chunk_order: ChunkOrder = "deeper") -> None:
        self.chunk_order: ChunkOrder = chunk_order

    def _pick(self, ready: ReadySet, first: Kind, second: Kind) -> Task | None:
        return ready.first(first, self.chunk_order) or ready.first(second, self.chunk_order) or ready.first(W)


class BackwardForward(Alternating):
    """BF: after a backward, forwards come first; otherwise, and at the start, backwards do.

    If no task of that kind is ready, the other kind runs. Only an enqueued task changes the priority, waiting does not.
    """

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        """See `rrfp.core.hint.Hint.choose`."""
        if view.last_kind is B:
            return self._pick(ready, F, B)
        return self._pick(ready, B, F)


class ForwardBackward(Alternating):
    """FB: after a forward, backwards come first; otherwise, and at the start, forwards do."""

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        """See `rrfp.core.hint.Hint.choose`."""
        if view.last_kind is F:
            return self._pick(ready, B, F)
        return self._pick(ready, F, B)
