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

from rrfp.compute.devices.base import Device, Event, Stream
from rrfp.compute.lanes.base import Execution, as_exception
from rrfp.compute.lanes.thread import ThreadLane, complete, settle
from rrfp.core import timeouts
from rrfp.log import get_logger

T = TypeVar("T")

logger = get_logger(__name__)


@dataclass(slots=True)
class _Issued:
    """A call that was made, and its place in the stream.

    Attributes:
        future: the call's.
        base: a point that the device had reached, and its time on the lane's clock.
        result: its return value.
        failure: the exception that it raised.
        launched: when it returned, on the lane's clock.
        start: the event before its work; None if the device refused it.
        end: the event behind it; likewise.
    """

    future: asyncio.Future[Any]
    base: tuple[Event, float]
    result: Any = None
    failure: Exception | None = None
    launched: float = 0.0
    start: Event | None = None
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
    """

    def __init__(
        self, device: Device, name: str = "rrfp-lane", *, depth: int = 2, nice: int = 0, is_urgent: bool = False
    ) -> None:
        super().__init__(name, nice=nice)
        self.depth = depth
        self.device = device
        self._stream = device.stream(is_urgent=is_urgent)
        #: To the watcher: calls that were made, and events that are not needed any more.
        self._issued: queue.SimpleQueue[_Issued | Event | None] = queue.SimpleQueue()
        #: The first failure of the device. Every later call fails with it.
        self._broken: Exception | None = None
        self._base: tuple[Event, float] | None = None
        self._is_calling = False
        self._has_warned = False

    def fence(self) -> None:
        """See :meth:`Lane.fence`."""
        if self._broken is None and not self._closed:
            event = self.device.current_stream().record()
            self._calls.put((partial(self._pass_fence, event), None))

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """See :meth:`Lane.adopt`."""
        self._note_use(tensors, self._stream)

    def hand_over(self, tensors: Iterable[Tensor]) -> None:
        """See :meth:`Lane.hand_over`."""
        self._note_use(tensors, self.device.current_stream())

    def stack(self) -> str:
        """See :meth:`Lane.stack`; where the call has returned, a line that says so."""
        if self._is_calling or self._thread is None:
            return super().stack()
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

    # On the lane's thread.

    def _run(
        self, call: Callable[[], T], future: asyncio.Future[Execution[T]] | None, loop: asyncio.AbstractEventLoop
    ) -> None:
        try:
            if future is None:
                call()
            elif self._broken is not None:
                settle(loop, future, None, self._broken)
            else:
                self._issue(call, future, loop)
        finally:
            del call, future

    def _issue(
        self, call: Callable[[], T], future: asyncio.Future[Execution[T]], loop: asyncio.AbstractEventLoop
    ) -> None:
        issued: _Issued | None = None
        self._is_calling = True
        try:
            issued = _Issued(future, self._base or self._new_base())
            with self._stream.issuing():
                issued.start = self._stream.record()
                try:
                    issued.result = call()
                finally:
                    issued.launched = time.monotonic()
            issued.end = self._stream.record()
        except BaseException as error:
            failure = as_exception(error)
            if issued is None:  # the device failed before
                self._broken = self.device.explain(failure)
                settle(loop, future, None, self._broken)
                return
            issued.failure = failure
            # An older call may be at fault, which the watcher finds out; but the device may never complete that one.
            _settle_later(loop, future, failure)
        finally:
            self._is_calling = False
            if issued is not None:
                self._issued.put(issued)
            # A failure's traceback holds this frame.
            del call, future, issued
        self._warn_if_strayed()

    def _pass_fence(self, event: Event) -> None:
        """Run what follows behind ``event``, and read both clocks anew: those of the device lose precision."""
        try:
            self._stream.wait(event)
            self._new_base()
            self._issued.put(event)
        except Exception:
            logger.debug("the device fails at a fence; the next call fails and is named", exc_info=True)

    def _new_base(self) -> tuple[Event, float]:
        if self._base is not None:
            self._issued.put(self._base[0])
            self._base = None
        event = self._stream.record()
        event.synchronize()
        self._base = event, time.monotonic()
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
        """Wait for the call's work, and complete its future."""
        failure = self._broken
        execution: Execution[Any] | None = None
        try:
            if failure is None:
                failure, execution = issued.failure, self._execution(issued)
        except BaseException as error:
            failure = self._broken = self.device.explain(issued.failure or as_exception(error))
        settle(loop, issued.future, execution, failure)
        if self._broken is None:
            for event in (issued.start, issued.end):
                if event is not None:
                    event.release()
        del issued, failure, execution  # the failure's traceback holds this frame

    def _execution(self, issued: _Issued) -> Execution[Any]:
        """Wait for the call's work, and read its times; raises the error of the device."""
        if issued.start is None or issued.end is None:
            return Execution(None, issued.launched, issued.launched)
        issued.end.synchronize()
        base, base_time = issued.base
        started = base_time + issued.start.seconds_since(base)
        ended = base_time + issued.end.seconds_since(base)
        return Execution(issued.result, started, ended, issued.launched)


def _settle_later(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], failure: Exception) -> None:
    """Let ``future`` fail if the watcher has not completed it in `DEVICE_VERDICT_S`."""
    with suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(loop.call_later, timeouts.DEVICE_VERDICT_S, complete, future, None, failure)
