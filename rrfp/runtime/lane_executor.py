"""What one rank has its lane do: tasks, and chores that are none. Knows neither why nor what follows."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from rrfp.compute.lanes.base import Execution, Lane
from rrfp.compute.mailbox import Mailbox, bytes_after, run_task
from rrfp.compute.program import StageProgram
from rrfp.core import events as ev
from rrfp.core.tasks import Task
from rrfp.runtime.stall.progress import Progress
from rrfp.trace.recorder import Recorder

T = TypeVar("T")


class LaneWork:
    """Hands work to a lane and tells what became of it. All methods are called on the loop of the lane.

    Args:
        program: what tasks compute.
        lane: where; somebody else starts it.
        mailbox: what tasks read, and where they put what they make.
        progress: told what runs.
        recorder: told when tasks ran.
        completed: told every task that has completed.
        fail: told the exception of a task.
    """

    def __init__(
        self,
        program: StageProgram,
        lane: Lane,
        mailbox: Mailbox,
        progress: Progress,
        recorder: Recorder,
        completed: Callable[[ev.Completed], None],
        fail: Callable[[BaseException, Task], None],
    ) -> None:
        self._program = program
        self._lane = lane
        self._mailbox = mailbox
        self._progress = progress
        self._recorder = recorder
        self._completed = completed
        self._fail = fail
        self._closed = False
        #: The thread on which a task is being computed, by its ident; None between tasks.
        self.thread: int | None = None

    def enqueue(self, task: Task) -> None:
        """Run ``task`` after everything enqueued before it."""
        done = self._lane.enqueue(partial(self._run, task))
        done.add_done_callback(partial(self._on_done, task))

    async def chore(self, name: str, call: Callable[[], T]) -> T:
        """Make ``call`` on the lane, and say meanwhile that it runs ``name``."""
        with self._progress.chore(name):
            return (await self._lane.enqueue(call)).result

    def close(self) -> None:
        """Serve nothing more, and tell nothing of what still runs; never waits for it. May be called twice."""
        self._closed = True
        self._lane.close()

    def _run(self, task: Task) -> tuple[int, int]:
        """Run ``task``, on the lane; returns what it leaves: once the next task has run, nobody could tell any more."""
        self.thread = threading.get_ident()
        try:
            run_task(self._program, self._mailbox, task)
            return bytes_after(self._program, self._mailbox, task)
        finally:
            self.thread = None

    def _on_done(self, task: Task, done: asyncio.Future[Execution[tuple[int, int]]]) -> None:
        error = done.exception()  # asked for in any case, or asyncio would complain that nobody did
        if self._closed:
            return
        if error is not None:
            self._fail(error, task)
            return
        try:
            self._complete(task, done.result())
        except Exception as broken:
            self._fail(broken, task)

    def _complete(self, task: Task, execution: Execution[tuple[int, int]]) -> None:
        self._progress.completed()
        self._recorder.ran(task, execution.started, execution.ended)
        held, output = execution.result
        self._completed(ev.Completed(task, held, execution.ended - execution.started, output))
