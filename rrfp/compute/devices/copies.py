"""Copies between a device and the host for transports, on two lanes: one for each direction of a rank's messages.

A copy is a call on a lane, so no copy blocks the loop, and its future completes when the device has made it. Sources
and copies stay referenced until then, so memory is never reused under a copy, whatever the caller drops.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from rrfp.compute.devices.base import Device
from rrfp.compute.devices.host_regions import HostRegions
from rrfp.compute.lanes.stream import StreamLane
from rrfp.core import timeouts
from rrfp.errors import TransportClosedError

_Result = TypeVar("_Result")

#: The copies, and the tensors that must live until these are complete.
_Copied = tuple[list[Tensor], object]


class StreamCopies:
    """The copies of one rank's transport; see :class:`rrfp.transports.DeviceCopies`, whose methods it has.

    Memory that it copies into belongs to its own streams, or on another device to the default one there: a lane that
    uses a received tensor adopts it. A lane and its
    two threads start with the first copy in that direction.

    Args:
        device: the rank's.
        name: of the threads.
    """

    def __init__(self, device: Device, name: str = "rrfp-copies") -> None:
        self.kind = device.kind
        self.index: int | None = getattr(device, "index", None)
        self._device = device
        self._regions = HostRegions(device)
        self._name = name
        self._lanes: dict[str, StreamLane] = {}
        self._pending: set[asyncio.Future[Any]] = set()
        self._closed = False

    def holds(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` lies in the device's memory."""
        return self._device.holds(tensor)

    def register(self, memory: Tensor) -> object:
        """A handle of memory that the first copy pins."""
        return self._regions.add(memory)

    async def to_host(self, tensors: Sequence[Tensor], into: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Copies in pinned memory, or in ``into``."""
        if into is None:
            return await self._run("send", partial(_copied, self._device.empty_on_host, tensors))
        return await self._run("send", partial(_copied_into, self._regions, tensors, into))

    async def to_device(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies on the device."""
        return await self._run("receive", partial(_to_device, self._device, self._regions, tensors))

    async def copy(self, tensors: Sequence[Tensor], target: Any) -> list[Tensor]:
        """Copies on the device of ``target``, another `StreamCopies` or this one."""
        assert isinstance(target, StreamCopies)
        return await self._run("send", partial(_copied, target._device.empty, tensors))

    def close(self) -> None:
        """Fail the waiting calls; copies under way end by themselves."""
        self._closed = True
        for lane in self._lanes.values():
            lane.close()
        for future in self._pending:
            if not future.done():
                with suppress(RuntimeError):  # the loop has ended
                    future.set_exception(_closed_error())

    async def _run(self, direction: str, call: Callable[[], tuple[_Result, object]]) -> _Result:
        """The first result of a call on a lane, once the device has done its work."""
        if self._closed:
            raise _closed_error()
        lane = self._lanes.get(direction)
        if lane is None:
            lane = self._lanes[direction] = StreamLane(self._device, f"{self._name}-{direction}", is_urgent=True)
            lane.start()
        future = lane.enqueue(call)
        del call
        self._pending.add(future)
        try:
            execution = await future
        except (TransportClosedError, OSError):  # the latter of memory, whose device works
            raise
        except Exception:
            # A failed device fails everything on it. The lane of the tasks knows which one was at fault.
            await asyncio.sleep(timeouts.DEVICE_VERDICT_S)
            raise
        finally:
            self._pending.discard(future)
        return execution.result[0]


def _closed_error() -> TransportClosedError:
    return TransportClosedError("the transport is closed")


def _copied(empty: Callable[[Tensor], Tensor], tensors: Sequence[Tensor]) -> _Copied:
    """Copies in memory that ``empty`` makes."""
    copies = []
    for tensor in tensors:
        source = dense(tensor)
        copy = empty(source)
        copy.copy_(source, non_blocking=True)
        copies.append(copy.requires_grad_(tensor.requires_grad))
    return copies, tensors


def _copied_into(regions: HostRegions, tensors: Sequence[Tensor], into: Sequence[Tensor]) -> _Copied:
    """Copies in memory of a transport, which is pinned now if it was not."""
    handles = [regions.pinned_around(target) for target in into]
    for tensor, target in zip(tensors, into, strict=True):
        target.copy_(dense(tensor), non_blocking=True)
    copies = [target.detach().requires_grad_(t.requires_grad) for target, t in zip(into, tensors, strict=True)]
    return copies, (tensors, into, handles)


def _to_device(device: Device, regions: HostRegions, tensors: Sequence[Tensor]) -> _Copied:
    copies, sources = [], []
    for tensor in tensors:
        source = pinned = dense(tensor)
        handle = regions.pinned_around(source)
        if handle is None:
            pinned = device.empty_on_host(source)
            pinned.copy_(source)
        copy = device.empty(pinned)
        copy.copy_(pinned, non_blocking=True)
        copies.append(copy.requires_grad_(tensor.requires_grad))
        sources.append((pinned, handle))
    return copies, (tensors, sources)


def dense(tensor: Tensor) -> Tensor:
    """The values in row-major memory and without a graph; a new tensor on its device unless they lie so."""
    # Where a copy to the host has to conjugate, torch does so on the host, before an asynchronous copy has arrived.
    return tensor.detach().resolve_conj().resolve_neg().contiguous()
