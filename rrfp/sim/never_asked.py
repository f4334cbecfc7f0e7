"""The hint of a core that does not decide: a follower, which runs a log, or a core that the explorer asks."""

from __future__ import annotations

from rrfp.core.hint import Hint, View
from rrfp.core.ready_set import ReadySet
from rrfp.core.tasks import Task


class NeverAsked(Hint):
    """Must not be asked to choose."""

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        """Never called.

        Raises:
            AssertionError: if it is.
        """
        raise AssertionError(f"stage {view.stage} was asked to choose, and something else decides for it")
