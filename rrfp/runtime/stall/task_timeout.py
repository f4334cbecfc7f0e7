"""Ends a pipeline whose task never returns, if the caller wants that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rrfp.errors import OverdueError
from rrfp.runtime.context import RankContext
from rrfp.runtime.stall.progress import Progress

#: A check is late by this part of the limit at most.
_PRECISION = 0.01


class TaskTimeout:
    """Watches the lane of one rank, whose tasks may take ``limit`` seconds."""

    def __init__(self, context: RankContext, progress: Progress, limit: float, describe: Callable[[int], str]) -> None:
        self._rank = context.topology.rank
        self._stack = context.lane.stack
        self._fail = context.fail
        self._progress = progress
        self._limit = limit
        self._describe = describe

    async def watch(self) -> None:
        """Fail once something has run for too long."""
        while (seconds := self._progress.running_seconds()) < self._limit:  # noqa: ASYNC110 - time is the event
            await asyncio.sleep(max(self._limit - seconds, _PRECISION * self._limit))
        running, task = self._progress.running(), self._progress.running_task()
        stack = self._stack()
        text = (
            f"{running} has not completed for {seconds:.1f} s, longer than abort_after, which is {self._limit:g}, on "
            f"{self._describe(self._rank)}"
        )
        self._fail(OverdueError(f"{text}, in:\n{stack}" if stack else text), task)
