"""A lane in front of a stream of a device: a call only issues work, and is complete when the device has run it.

The lane's thread makes the calls, one after the other, and records an event behind each. A second thread, the watcher,
waits for the events in order and completes the futures, so neither the loop nor the next call waits for the device. A
stream is in order, so the first event that fails names the call at fault, whatever call the error surfaced in.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from rrfp import timeouts
from rrfp.compute.lanes.base import Execution, as_exception
from rrfp.compute.lanes.thread import ThreadLane, complete, settle
from rrfp.devices.base import Device, Event, Stream
from rrfp.log import get_logger
from rrfp.plain import whole


@dataclass(slots=True)
class Base:
    """A point that the device has reached, and its time on the lane's clock, as narrowly as it is known."""

    event: Event
    time: float

    def times(self, start: Event, end: Event, *, began: float, launched: float) -> tuple[float, float]:
        """When a call's work started and ended; it was made at ``began``, returned at ``launched``, and is complete."""
        started, ended = start.seconds_since(self.event), end.seconds_since(self.event)
        least, most = max(began - started, launched - ended), time.monotonic() - ended
        self.time = narrowed(self.time, least=least, most=most)
        return max(self.time + started, began), max(self.time + ended, launched)


def narrowed(estimate: float, *, least: float, most: float) -> float:
    """The time of a base on the lane's clock.

    The thread that read it was late by an unknown time. A call does not reach the device before it was made, nor is it
    observed before it ended; each such pair of times narrows the estimate.
    """
    return max(least, min(estimate, most))


T = TypeVar("T")

logger = get_logger(__name__)


@dataclass(slots=True)
class _Issued:
    future: asyncio.Future[Any]
    #: Relates the device's clock to the lane's; None if the device refused that.
    base: Base | None = None
    result: Any = None
    #: The exception that it raised, or that kept it from being made.
    failure: Exception | None = None
    #: When it began, on the lane's clock.
    began: float = 0.0
    #: When it returned, on the same clock.
    launched: float = 0.0
    #: The event before its work; None if the device refused it, or times are not wanted.
    start: Event | None = None
    is_made: bool = False
    #: The event behind it; None if the device refused it, or the call was not made.
    end: Event | None = None


class StreamLane(ThreadLane):
    """Makes calls on one daemon thread, whose work goes on one stream of ``device``.

    A call may use other streams, if the lane's stream has rejoined them when it returns. Backward passes run on the
    lane's thread, not on the device's own thread of autograd, so lanes of one process do not queue behind each other.

    Args:
        device: where the work runs.
        name: name of the thread.
        depth: how many calls may be issued and not complete. From 2 on the device need not wait for the loop.
        nice: as for `ThreadLane`.
        is_urgent: whether its work goes before that of other streams.
        is_timed: whether executions have the device's times; else they have the host's: when the call was made, and
            when its end was seen. Each time is a call of the driver.
    """

    device: Device

    def __init__(
        self,
        device: Device,
        name: str = "rrfp-lane",
        *,
        depth: int = 2,
        nice: int = 0,
        is_urgent: bool = False,
        is_timed: bool = True,
    ) -> None:
        super().__init__(name, nice=nice)
        self.depth = whole("depth", depth, 1)
        self.device = device
        self.offers = None  # the next call waits behind the running one already
        self._stream = device.stream(is_urgent=is_urgent)
        #: To the watcher: calls that were made, and events that are not needed any more.
        self._issued: queue.SimpleQueue[_Issued | Event | None] = queue.SimpleQueue()
        #: The first failure of the device. Every later call fails with it.
        self._broken: Exception | None = None
        self._is_timed = is_timed
        self._base: Base | None = None
        self._is_calling = False
        #: Calls that the lane's thread has taken, and those that the watcher has completed.
        self._made = self._completed = 0
        #: When the last completed call ended.
        self._ended = 0.0
        self._has_warned = False

    def fence(self) -> None:
        """See :meth:`Lane.fence`. If the device refuses the event, all later calls fail: their order would be wrong."""
        if self._broken is not None or self._closed:
            return
        try:
            event = self.device.current_stream().record()
        except Exception as error:
            self.device.keep_noted()
            self._calls.put((partial(self._break, error), None))
        else:
            self._calls.put((partial(self._pass_fence, event), None))

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        self._note_use(tensors, self._stream)

    def hand_over(self, tensors: Iterable[Tensor]) -> None:
        self._note_use(tensors, self.device.current_stream())

    def stack(self) -> str:
        """See :meth:`Lane.stack`; where the call has returned, a line that says so."""
        if self._is_calling:
            has_earlier = self._made - self._completed > 1
            first = f"{self.device.name} has not completed an earlier call; the next one is in:\n"
            return (first if has_earlier else "") + super().stack()
        if self._made == self._completed:
            return ""
        return f"the call has returned, and {self.device.name} has not completed its work"

    def _note_use(self, tensors: Iterable[Tensor], stream: Stream) -> None:
        for tensor in tensors:
            if self.device.holds(tensor):
                self.device.note_use(tensor, stream)

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        watcher = threading.Thread(target=self._watch, args=(loop,), name=f"{self._name}-watcher", daemon=True)
        watcher.start()
        try:
            with torch.autograd.set_multithreading_enabled(False):
                super()._serve(loop)
        finally:
            self._issued.put(None)
            # The end of the process waits for this thread: the watcher must not return into a dying interpreter.
            watcher.join()

    # On the lane's thread.

    def _run(
        self, call: Callable[[], T], future: asyncio.Future[Execution[T]] | None, loop: asyncio.AbstractEventLoop
    ) -> None:
        issued: _Issued | None = None
        try:
            if future is None:
                call()
                return
            issued = _Issued(future, failure=self._broken)
            self._made += 1
            if issued.failure is None:
                self._issue(call, issued)
            if issued.failure is not None:
                # An older call may be at fault, which the watcher finds out; but the device may never complete that.
                _settle_later(loop, future, issued.failure)
            self._issued.put(issued)
        finally:
            del call, future, issued  # a failure's traceback holds this frame

    def _issue(self, call: Callable[[], T], issued: _Issued) -> None:
        """Make the call between two events, of which the device may refuse each."""
        self._is_calling = True
        try:
            if self._is_timed:
                issued.base = self._base or self._new_base()
            issued.began = issued.launched = time.monotonic()
            with self._stream.issuing():
                if self._is_timed:
                    issued.start = self._stream.record(is_timed=True)
                issued.is_made = True
                try:
                    issued.result = call()
                finally:
                    issued.launched = time.monotonic()
        except BaseException as error:
            issued.failure = as_exception(error)
        finally:
            self._is_calling = False
        try:
            if issued.is_made:
                issued.end = self._stream.record(is_timed=self._is_timed)
        except Exception as error:
            issued.failure = issued.failure or error
        finally:
            if issued.end is None:  # while the failure's traceback still holds what the call used
                self.device.keep_noted()
            del call, issued  # a failure's traceback holds this frame
        self._warn_if_strayed()

    def _pass_fence(self, event: Event) -> None:
        """Run what follows behind ``event``, and read both clocks anew: those of the device lose precision."""
        try:
            if self._is_timed:
                self._new_base()  # first, so that the lane need not wait for the caller's work
            self._stream.wait(event)
            self._issued.put(event)
        except Exception as error:
            self._break(error)

    def _break(self, error: Exception) -> None:
        """The device is unusable: let all later calls fail."""
        self.device.keep_noted()
        if self._broken is None:
            self._broken = self.device.explain(error)

    def _new_base(self) -> Base:
        if self._base is not None:
            self._issued.put(self._base.event)
            self._base = None
        event = self._stream.record(is_timed=True)
        event.synchronize()
        self._base = Base(event, time.monotonic())
        return self._base

    def _warn_if_strayed(self) -> None:
        if self._stream.strayed and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "a module left another stream of %s current; the lane waits for the work on it. Before a module "
                "returns, it must rejoin its side streams and make the stream that it found current again",
                self.device.name,
            )

    # On the watcher's thread.

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        while (item := self._issued.get()) is not None:
            if isinstance(item, Event):
                item.release()
            else:
                self._complete(item, loop)
            del item  # otherwise the last call's result would live until the next one

    def _complete(self, issued: _Issued, loop: asyncio.AbstractEventLoop) -> None:
        failure = self._broken
        execution: Execution[Any] | None = None
        has_broken = False
        try:
            if failure is None:
                has_broken = issued.end is None  # the device refused to go on, or never began
                failure = issued.failure
                if issued.end is not None:
                    issued.end.synchronize()
                if failure is None:
                    execution = self._execution(issued)
        except Exception as error:
            if failure is not None:
                failure.add_note(f"{self.device.name} failed too: {error}")
            self.device.keep_noted()
            has_broken, failure = True, failure or error
        if has_broken and failure is not None:
            failure = self.device.explain(failure)
        self._completed += 1
        settle(loop, issued.future, execution, failure)
        if has_broken and self._broken is None:  # after it was settled, so that no later call fails before this one
            self._broken = failure
        if self._broken is None:
            for event in (issued.start, issued.end):
                if event is not None:
                    event.release()
        del issued, failure, execution  # the failure's traceback holds this frame

    def _execution(self, issued: _Issued) -> Execution[Any]:
        base, start, end = issued.base, issued.start, issued.end
        if not self._is_timed:
            return Execution(issued.result, issued.began, time.monotonic(), issued.launched)
        assert base is not None
        assert start is not None
        assert end is not None
        started, ended = base.times(start, end, began=issued.began, launched=issued.launched)
        started = max(started, self._ended)
        self._ended = max(ended, started)
        return Execution(issued.result, started, self._ended, issued.launched)


def _settle_later(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], failure: Exception) -> None:
    """Let ``future`` fail if the watcher has not completed it in `DEVICE_VERDICT_S`."""
    with suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(_settle_after_verdict, loop, future, failure)
    del future, failure


def _settle_after_verdict(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], failure: Exception) -> None:
    if future.done():
        return
    timer = loop.call_later(timeouts.DEVICE_VERDICT_S, complete, future, None, failure)
    future.add_done_callback(lambda _: timer.cancel())  # else it would hold the failure, and all in its traceback
