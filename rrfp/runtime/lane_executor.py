"""Runs tasks on the lane of a rank, and extra calls between them. Knows neither why nor what follows."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from rrfp.compute.activations import tensors_in
from rrfp.compute.async_tensors import inner_tensors
from rrfp.compute.lanes.base import Execution
from rrfp.compute.mailbox import run_task
from rrfp.compute.program import StageProgram
from rrfp.core import events as ev
from rrfp.log import get_logger
from rrfp.model.tasks import Kind, Task
from rrfp.runtime.context import RankContext
from rrfp.runtime.supervisor import failure_on_loop

logger = get_logger(__name__)

#: A call that returns before this share of its device time is over leaves the host time for the next one.
_MOST_OF_IT = 0.8

#: Shorter calls, in seconds, are not worth a line.
_NOTICEABLE_S = 1e-3

#: The first calls of a kind load kernels, measure and compile; so only the last of so many in a row is named.
_IN_A_ROW = 3


class DeviceWaits:
    """Looks at the executions of one rank. Each kind of task is named once for each virtual stage."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        #: Calls in a row that kept the host; after `_IN_A_ROW` they are counted no more.
        self._kept: Counter[tuple[Kind, int]] = Counter()

    def saw(self, task: Task, execution: Execution[Any]) -> None:
        if execution.launched is None:
            return
        key = (task.kind, task.virtual_stage)
        if self._kept[key] == _IN_A_ROW:
            return
        # Both from the device's start: behind another task a call may return before the device begins with it.
        host, device = execution.launched - execution.started, execution.ended - execution.started
        self._kept[key] = self._kept[key] + 1 if host > _NOTICEABLE_S and host >= _MOST_OF_IT * device else 0
        if self._kept[key] == _IN_A_ROW:
            logger.warning(
                "%s blocked the host for as long as the device computed (%.1f of %.1f ms), as the two calls of its "
                "kind before did: it "
                "waits for the device (.item(), .cpu(), nonzero?) or launches many small kernels",
                task,
                host * 1e3,
                device * 1e3,
                stage=self._stage,
            )


T = TypeVar("T")


class _Here(threading.local):
    """Whose task is being computed on this thread, and which; None between tasks."""

    running: tuple[LaneExecutor, Task] | None = None


_here = _Here()


def running_here() -> tuple[LaneExecutor, Task] | None:
    """The task that is being computed on the calling thread, by whichever pipeline; None if there is none."""
    return _here.running


class LaneExecutor:
    """Hands work to a lane and reports its completion. Its public methods are called on the loop of the lane."""

    def __init__(
        self, context: RankContext, program: StageProgram, on_completed: Callable[[ev.Completed], None]
    ) -> None:
        self.completed = 0
        self.running_since = 0.0
        self._program = program
        self._lane = context.lane
        self._mailbox = context.mailbox
        self._activity = context.activity
        self._recorder = context.recorder
        self._fail = context.fail
        self._device_waits = DeviceWaits(context.topology.stage)
        self._on_completed = on_completed
        self._closed = False
        self._enqueued = 0
        self._extras: list[str] = []

    @property
    def extra(self) -> str | None:
        """The extra call that began first and has not ended, by name."""
        return self._extras[0] if self._extras else None

    def enqueue(self, task: Task) -> None:
        """Run ``task`` after everything enqueued before it."""
        done = self._lane.enqueue(partial(self._run, task))
        done.add_done_callback(partial(self._on_done, task))
        self._count_enqueued()

    @property
    def takes_offers(self) -> bool:
        return self._lane.offers is not None

    def offer(self, task: Task) -> None:
        """Let the lane run ``task`` as soon as its running call has returned, unless it is withdrawn before."""
        assert self._lane.offers is not None
        done = self._lane.offers.offer(partial(self._run, task))
        done.add_done_callback(partial(self._on_done, task))

    def withdraw(self) -> bool:
        """Take the offered task back; False if the lane has begun it: then it counts as enqueued."""
        assert self._lane.offers is not None
        if self._lane.offers.withdraw():
            return True
        self._count_enqueued()
        return False

    async def run_extra(self, name: str, call: Callable[[], T], received: Iterable[Tensor] = ()) -> T:
        """Make ``call``, which is no task, on the lane; meanwhile the rank is busy with ``name``.

        ``received`` are the tensors of other ranks that the call uses.
        """
        return await self.start_extra(name, call, received)

    def start_extra(self, name: str, call: Callable[[], T], received: Iterable[Tensor] = ()) -> Coroutine[Any, Any, T]:
        """As `run_extra`: what is enqueued from here on runs behind it, before it is awaited."""
        return self._end_extra(name, self._lane.enqueue(partial(self._run_extra, call, received)))

    async def _end_extra(self, name: str, done: Awaitable[Execution[T]]) -> T:
        with self.extra_call(name):
            return (await done).result

    @contextmanager
    def extra_call(self, name: str) -> Iterator[None]:
        """In here the rank is busy with ``name``, on its lane or on a thread of a library."""
        self._extras.append(name)
        self.running_since = self._lane.now()
        try:
            yield
        finally:
            self._extras.remove(name)
            self._activity.touch()

    def hand_over(self, outputs: Mapping[int, Any]) -> None:
        """Let the calling thread use ``outputs`` of the last virtual stage. Called on the caller's thread."""
        self._lane.hand_over(part for tensor in tensors_in(outputs) for part in inner_tensors(tensor))

    def computes_here(self) -> bool:
        """Whether one of its tasks is being computed on this thread. May be called on any thread."""
        return (running := running_here()) is not None and running[0] is self

    def close(self) -> None:
        """Run nothing more, and report nothing that still runs; never waits for it. May be called twice."""
        self._closed = True
        self._lane.close()

    def _count_enqueued(self) -> None:
        self._enqueued += 1
        if self._enqueued == 1:
            self.running_since = self._lane.now()

    # On the lane's thread.

    def _run_extra(self, call: Callable[[], T], received: Iterable[Tensor]) -> T:
        self._lane.adopt(received)
        return call()

    def _run(self, task: Task) -> tuple[int, int]:
        """Run ``task``; returns the bytes it leaves: after the next task these could not be separated."""
        _here.running = (self, task)
        try:
            self._lane.adopt(self._mailbox.received(task))
            return run_task(self._program, self._mailbox, task)
        finally:
            _here.running = None

    # On the loop.

    def _on_done(self, task: Task, done: asyncio.Future[Execution[tuple[int, int]]]) -> None:
        error = done.exception()  # read in any case, or asyncio would log that no one has
        if self._closed:
            return
        if error is not None:
            self._fail(error, task)
            return
        try:
            self._complete(task, done.result())
        except BaseException as broken:  # in this callback SystemExit of a hint that observes would end the loop
            self._fail(failure_on_loop(broken) or broken, task)

    def _complete(self, task: Task, execution: Execution[tuple[int, int]]) -> None:
        self._enqueued -= 1
        self.completed += 1
        self.running_since = execution.ended  # of the task behind it, if there is one
        held, output = execution.result
        self._recorder.ran(task, execution.started, execution.ended, execution.launched, held)
        self._device_waits.saw(task, execution)
        self._on_completed(ev.Completed(task, held, execution.ended - execution.started, output))
