"""A hint for cores that do not decide: followers, which run a log, and cores that the explorer asks."""

from __future__ import annotations

from rrfp.core.hint import Hint, View
from rrfp.core.ready_set import ReadySet
from rrfp.model.tasks import Task


class UnusedHint(Hint):
    """Must not be asked to choose."""

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        """Never called."""
        raise AssertionError(f"stage {view.stage} was asked to choose, and something else decides for it")
