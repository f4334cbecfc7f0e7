"""Shared by the lane checks: the lane under test, its device, and waiting with a timeout.

Checks wait for events, `PATIENCE_S` at most; to show that an event does *not* happen, they watch for `QUIET_S`.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from rrfp.compute.lanes.base import Execution, Lane
from rrfp.devices.base import Device
from rrfp.testing.checks import PATIENCE_S, SkippedError, soon

T = TypeVar("T")

#: Seconds for which a check watches that an event does not happen.
QUIET_S = 0.05

#: Numbers in a device tensor of the checks.
LENGTH = 1024


@dataclass(frozen=True)
class Subject:
    """A started lane.

    Attributes:
        lane: the lane under test.
        may_block: whether calls run on a thread of their own, where they may wait for other threads.
        device: to which calls issue work; None if a call is complete when it returns.
        delay: issues work of at least 20 ms on the device's current stream; not needed where all work is as slow.
        break_next: lets the device fail, for good, at the next block of work; None where that is impossible: the checks
            of late errors are then skipped.
        problems: the races that the device has found; a device that looks for none returns none.
    """

    lane: Lane
    may_block: bool = True
    device: Device | None = None
    delay: Callable[[], None] = lambda: None
    break_next: Callable[[], None] | None = None
    problems: Callable[[], Sequence[str]] = tuple

    def needs_blocking(self) -> None:
        """Skip a check whose calls wait for something."""
        if not self.may_block:
            raise SkippedError("calls on a thread of their own")

    def needs_device(self) -> Device:
        """Skip a check without asynchronous work."""
        if self.device is None:
            raise SkippedError("a device that runs work after the call has returned")
        return self.device

    def fill(self, tensor: Tensor, value: float) -> None:
        """Issue slow work, in a call of the lane or in a block of the caller's stream.

        Args:
            tensor: what the work fills.
            value: with which number.
        """
        self.delay()
        tensor.fill_(value)


MakeLane = Callable[[], AbstractAsyncContextManager[Subject]]
"""Yields a started lane; afterwards frees it, whatever state it is in."""

Check = Callable[[MakeLane], Coroutine[Any, Any, None]]
"""One check; raises AssertionError with one sentence about the breach, or SkippedError with the part that it lacks."""


async def completed(future: asyncio.Future[Execution[T]], event: str = "a call completes") -> Execution[T]:
    """The execution of a call, within `PATIENCE_S`; raises the call's error."""
    await soon(asyncio.wait([future]), event)
    return future.result()


async def failure(future: asyncio.Future[Any], event: str) -> BaseException:
    """The exception of a call that must fail."""
    await soon(asyncio.wait([future]), event)
    error = future.exception()
    assert error is not None, f"{event}: it has a result instead"
    return error


async def full_on(device: Device, value: float) -> Tensor:
    """A complete tensor on the device, from this thread's stream."""
    tensor = device.empty(torch.empty(LENGTH))
    with device.current_stream().issuing():
        tensor.fill_(value)
    await synchronized(device)
    return tensor


async def synchronized(device: Device) -> None:
    """Wait for the work of the calling thread's stream."""
    event = device.current_stream().record()
    await soon(asyncio.to_thread(event.synchronize), "the device completes the caller's work")


def holds(tensor: Tensor, value: float) -> bool:
    """Whether the memory of ``tensor`` has ``value`` everywhere now."""
    return bool((tensor.cpu() == value).all())


class LaneGate:
    """Holds a call until it is opened; by itself after `PATIENCE_S`, lest a breach hang."""

    def __init__(self) -> None:
        #: Set when the call has begun.
        self.is_reached = asyncio.Event()
        self.has_given_up = False
        self._loop = asyncio.get_running_loop()
        self._opened = threading.Event()

    def wait_here(self) -> None:
        self._loop.call_soon_threadsafe(self.is_reached.set)
        self.has_given_up = not self._opened.wait(PATIENCE_S)

    def open(self) -> None:
        self._opened.set()
