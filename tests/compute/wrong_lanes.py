"""Lanes in front of a device that break their contract, each in one way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

from torch import Tensor

from rrfp import Execution
from rrfp.compute.lanes.stream import StreamLane, _Issued
from rrfp.compute.lanes.thread import settle
from rrfp.devices.base import Device
from rrfp.lab.device_double import DoubleDevice
from rrfp.testing.lane_checks import MakeLane, Subject


class CompleteAtReturn(StreamLane):
    """Completes a call when it returns."""

    def _complete(self, issued: _Issued, loop: asyncio.AbstractEventLoop) -> None:
        execution: Execution[Any] = Execution(issued.result, issued.began, issued.launched)
        settle(loop, issued.future, execution, issued.failure)


class NoFence(StreamLane):
    """Does not wait for the caller's work."""

    def fence(self) -> None:
        pass


class NoAdopt(StreamLane):
    """Lets received memory be reused while it is read."""

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        pass


class NoHandOver(StreamLane):
    """Lets its memory be reused while the caller reads it."""

    def hand_over(self, tensors: Iterable[Tensor]) -> None:
        pass


class ManyStreams(StreamLane):
    """Issues each call on a new stream."""

    def _run(self, call: Any, future: Any, loop: Any) -> None:
        self._stream = self.device.stream()
        super()._run(call, future, loop)


class WrongOrder(StreamLane):
    """Swaps every two calls."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._waiting: list[Any] = []

    def enqueue(self, call: Callable[[], Any]) -> asyncio.Future[Execution[Any]]:
        assert self._loop is not None
        future: asyncio.Future[Any] = self._loop.create_future()
        self._waiting.append((call, future))
        if len(self._waiting) == 2:
            for item in reversed(self._waiting):
                self._calls.put(item)
            self._waiting.clear()
        return future


class WaitsForDevice(StreamLane):
    """Waits for the device before a call returns, in spite of its depth."""

    def _issue(self, call: Callable[[], Any], issued: _Issued) -> None:
        super()._issue(call, issued)
        assert issued.end is not None
        issued.end.synchronize()


class WaitsInClose(StreamLane):
    """Waits for the running call when it is closed."""

    def close(self, last: Callable[[], object] | None = None) -> None:
        super().close(last)
        if self._thread is not None:
            self._thread.join()


class KeepsResult(StreamLane):
    """Holds the last result."""

    def _complete(self, issued: _Issued, loop: asyncio.AbstractEventLoop) -> None:
        self.last = issued.result
        super()._complete(issued, loop)


class NamesLast(StreamLane):
    """After a failure of the device it goes on as before."""

    def _complete(self, issued: _Issued, loop: asyncio.AbstractEventLoop) -> None:
        super()._complete(issued, loop)
        self._broken = None


def subject_with(lane: type[StreamLane]) -> MakeLane:
    @asynccontextmanager
    async def make() -> AsyncIterator[Subject]:
        device = DoubleDevice(0.03)
        made = lane(device)
        made.start()
        try:
            yield Subject(made, device=device, break_next=device.fail, problems=lambda: device.problems)
        finally:
            made.close()
            await asyncio.to_thread(device.close)

    return make
