"""Copies between a device and the host for transports, on two lanes: one for each direction of a rank's messages.

A copy is a call on a lane, so no copy blocks the loop, and its future completes when the device has made it. Sources
and copies stay referenced until then, so memory is never reused under a copy, whatever the caller drops.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from rrfp import timeouts
from rrfp.devices.base import ByteRange, CopyLane, CopyLaneClass, Device, DeviceSharing, SharedMemory
from rrfp.errors import TransportClosedError
from rrfp.log import get_logger

_log = get_logger(__name__)


class HostRegion:
    """Memory that is pinned when it is first used, and as long as this lives."""

    def __init__(self, regions: HostRegions, memory: Tensor) -> None:
        self._regions = regions
        self._memory = memory
        self.start = memory.data_ptr()
        self.stop = self.start + memory.nbytes
        self._is_pinned: bool | None = None

    def pin(self) -> bool:
        """Whether the memory is pinned, after an attempt."""
        if self._is_pinned is None:
            self._is_pinned = self._regions.pin(self._memory)
            if self._is_pinned:
                # It refers to the memory, which is thus unpinned before it is freed. A process that ends needs neither.
                unpin = partial(_unpin, self._regions.device, self._memory, os.getpid())
                weakref.finalize(self, unpin).atexit = False
        return self._is_pinned


def _unpin(device: Device, memory: Tensor, process: int) -> None:
    # A forked child has copies of these objects, and no device.
    if os.getpid() == process:
        device.unpin(memory)


class HostRegions:
    """The regions of one rank. Thread-safe."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._lock = threading.Lock()
        self._regions: weakref.WeakSet[HostRegion] = weakref.WeakSet()
        self._has_warned = False

    def pin(self, memory: Tensor) -> bool:
        """Whether the device could pin ``memory``; the first time that it cannot is logged."""
        is_pinned = self.device.pin(memory)
        if not is_pinned and not self._has_warned:
            self._has_warned = True
            name, size = self.device.name, memory.nbytes
            _log.warning("%s cannot pin %d bytes of shared memory: messages are copied once more", name, size)
        return is_pinned

    def add(self, memory: Tensor) -> HostRegion:
        """A region that exists as long as anything refers to it."""
        region = HostRegion(self, memory)
        with self._lock:
            self._regions.add(region)
        return region

    def pinned_around(self, tensor: Tensor) -> HostRegion | None:
        """The pinned region of a contiguous ``tensor``, to be kept; or None."""
        start = tensor.data_ptr()
        with self._lock:
            regions = list(self._regions)
        around = (region for region in regions if region.start <= start and start + tensor.nbytes <= region.stop)
        region = next(around, None)
        return region if region is not None and region.pin() else None


#: Dtype, shape and requires_grad of a tensor.
Spec = tuple[torch.dtype, tuple[int, ...], bool]

_Result = TypeVar("_Result")

#: A call on a lane: appends what must live until its copies are complete.
_Call = Callable[[list[object]], _Result]

#: What calls that failed with their device had kept. torch before 2.15 ends the process where pinned memory is freed
#: after such a failure.
_never_freed: list[list[object]] = []


class DeviceCopies:
    """Copies tensors into and out of the memory of one rank's device, on streams of their own.

    Each method returns when the device has made the copies, in the order of the arguments. A copy is a dense leaf with
    memory of its own, and requires grad exactly if its source does. Sources must be complete when they are passed, and
    must not be written to before the call returns; cancelled, the call drops the copies. The methods are called on one
    loop, which they never block, and raise the device's error if it fails, `TransportClosedError` once closed.

    Args:
        device: the rank's.
        lane_class: makes the lanes on which copies are issued: one for each direction, with the first copy there.
        name: of the lanes' threads.

    Attributes:
        kind: the device's type, such as ``"cuda"``.
        index: the device's number among those of its type; None where numbers mean nothing.
    """

    def __init__(self, device: Device, lane_class: CopyLaneClass, name: str = "rrfp-copies") -> None:
        self.kind = device.kind
        self.index: int | None = getattr(device, "index", None)
        self._device = device
        self._lane_class = lane_class
        self._regions = HostRegions(device)
        self._name = name
        self._lanes: dict[str, CopyLane] = {}
        #: By lane, shared memory that closes when the lane does.
        self._closing: defaultdict[str, list[SharedMemory]] = defaultdict(list)
        self._pending: set[asyncio.Future[Any]] = set()
        self._closed = False

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the device's memory.

        Args:
            tensor: any tensor.
        """
        return self._device.holds(tensor)

    def register(self, memory: Tensor) -> object:
        """Pin memory of a transport before the first copy from or into it, so that no other copy is needed.

        Args:
            memory: on the host; tensors lie anywhere in it.

        Returns:
            A handle. The memory stays pinned while anything refers to it, and is not freed before.
        """
        return self._regions.add(memory)

    async def to_host(
        self, tensors: Sequence[Tensor], into: Sequence[Tensor] | None = None, *, peer: int | None = None
    ) -> list[Tensor]:
        """Copy tensors of the device into pooled pinned memory, or into that of given tensors.

        Args:
            tensors: dense ones that the device holds.
            into: tensors with the same dtypes and shapes, contiguous. Cancelled, the call may still write to them.
            peer: the rank that they are for.
        """
        if into is None:
            return await self._run("send", peer, partial(_copied, self._device.empty_on_host, tensors))
        return await self._run("send", peer, partial(_copied_into, self._regions, tensors, into))

    async def to_device(self, tensors: Sequence[Tensor], *, peer: int | None = None) -> list[Tensor]:
        """Copy tensors into the device's memory. Where another stream uses them, their memory must be noted there.

        Args:
            tensors: dense ones on the CPU, in any memory.
            peer: the rank that they came from.
        """
        return await self._run("receive", peer, partial(_to_device, self._device, self._regions, tensors))

    async def copy(self, tensors: Sequence[Tensor], target: DeviceCopies) -> list[Tensor]:
        """Copy tensors of the device into the memory of the same or another device, without the host's.

        Args:
            tensors: dense ones that the device holds.
            target: of the rank that will own the copies, in this process.
        """
        return await self._run("send", None, partial(_copied, target._device.empty, tensors))

    def new_lane(self, name: str) -> CopyLane:
        """A lane of its own on the device, for other work of a transport; not started, and the caller's to close.

        Args:
            name: of its thread.
        """
        return self._lane_class(self._device, name, is_urgent=True, is_timed=False)

    def close(self) -> None:
        """Make waiting and later calls raise. May be called twice; never waits: copies under way end by themselves."""
        self._closed = True
        for name, lane in self._lanes.items():
            memories = self._closing.get(name)
            lane.close(None if memories is None else partial(_close_all, memories))
        for future in self._pending:
            if not future.done():
                with suppress(RuntimeError):  # the loop has ended
                    future.set_exception(_closed_error())

    def _lane_name(self, direction: str, peer: int | None) -> str:
        return f"{self._name}-{direction}" if peer is None else f"{self._name}-{direction}-{peer}"

    async def _run(self, direction: str, peer: int | None, call: _Call[_Result]) -> _Result:
        """The result of a call on a lane, once the device has done its work."""
        if self._closed:
            raise _closed_error()
        name = self._lane_name(direction, peer)
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = self.new_lane(name)
            lane.start()
        kept: list[object] = []
        future = lane.enqueue(partial(_call, call, kept))
        del call
        self._pending.add(future)
        try:
            execution = await future
        except (TransportClosedError, OSError):  # the latter of memory, whose device works
            raise
        except Exception:
            _never_freed.append(kept)
            # A failed device fails everything on it. The lane of the tasks knows which one was at fault.
            await asyncio.sleep(timeouts.DEVICE_VERDICT_S)
            raise
        finally:
            self._pending.discard(future)
        result: _Result = execution.result[0]
        return result


def _close_all(memories: list[SharedMemory]) -> None:
    while memories:
        with suppress(Exception):  # of a device that has failed
            memories.pop().close()


def _call(call: _Call[_Result], kept: list[object]) -> tuple[_Result, list[object]]:
    """The call's result, and what the lane has to keep meanwhile."""
    return call(kept), kept


def held_by(copies: DeviceCopies, tensors: Sequence[Tensor | None]) -> list[int]:
    return [index for index, tensor in enumerate(tensors) if tensor is not None and copies.holds(tensor)]


async def with_copies(
    tensors: Sequence[Tensor | None],
    indices: Sequence[int],
    copy: Callable[[Sequence[Tensor]], Awaitable[list[Tensor]]],
) -> list[Tensor | None]:
    """``tensors`` with those at ``indices`` replaced by their copies."""
    replaced = list(tensors)
    sources = [tensor for index in indices if (tensor := tensors[index]) is not None]
    for index, made in zip(indices, await copy(sources), strict=True):
        replaced[index] = made
    return replaced


def _closed_error() -> TransportClosedError:
    return TransportClosedError("the transport is closed")


def _copied(empty: Callable[[Tensor], Tensor], tensors: Sequence[Tensor], kept: list[object]) -> list[Tensor]:
    """Copies in memory that ``empty`` makes."""
    copies: list[Tensor] = []
    kept += (tensors, copies)
    for tensor in tensors:
        source = dense(tensor)
        copy = empty(source)
        copy.copy_(source, non_blocking=True)
        copies.append(copy.requires_grad_(tensor.requires_grad))
    return copies


def _copied_into(
    regions: HostRegions, tensors: Sequence[Tensor], into: Sequence[Tensor], kept: list[object]
) -> list[Tensor]:
    """Copies in memory of a transport, which is pinned now if it was not."""
    kept += (tensors, into, [regions.pinned_around(target) for target in into])
    for tensor, target in zip(tensors, into, strict=True):
        target.copy_(dense(tensor), non_blocking=True)
    return [target.detach().requires_grad_(t.requires_grad) for target, t in zip(into, tensors, strict=True)]


def _to_device(device: Device, regions: HostRegions, tensors: Sequence[Tensor], kept: list[object]) -> list[Tensor]:
    copies = []
    for tensor in tensors:
        source = pinned = dense(tensor)
        handle = regions.pinned_around(source)
        if handle is None:
            pinned = device.empty_on_host(source)
            pinned.copy_(source)
        copy = device.empty(pinned)
        kept += (tensor, pinned, handle)
        copy.copy_(pinned, non_blocking=True)
        copies.append(copy.requires_grad_(tensor.requires_grad))
    return copies


def dense(tensor: Tensor) -> Tensor:
    """The values in row-major memory, without a graph."""
    # Where a copy to the host has to conjugate, torch does so on the host, before an asynchronous copy has arrived.
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def copies_of(device: Device, lane_class: CopyLaneClass, name: str = "rrfp-copies") -> DeviceCopies:
    """The copies of a rank's transport; with shared memory, if there is any."""
    if device.sharing is None:
        return DeviceCopies(device, lane_class, name)
    return SharesDeviceMemory(device, lane_class, device.sharing, name)


class SharesDeviceMemory(DeviceCopies):
    """Copies of a device that has memory which other processes of the host can open.

    A process makes such memory and publishes its fields, and another one opens it. Tensors pass through it in parts:
    the first process writes them and says so, the other one reads them and says so. Nothing else keeps the two from
    using the same bytes at once.

    Args:
        device: as for `DeviceCopies`.
        lane_class: as for `DeviceCopies`.
        sharing: makes and opens the memory.
        name: as for `DeviceCopies`.

    Attributes:
        sharing: the way in which memory is shared; both ends must have the same.
    """

    def __init__(
        self, device: Device, lane_class: CopyLaneClass, sharing: DeviceSharing, name: str = "rrfp-copies"
    ) -> None:
        super().__init__(device, lane_class, name)
        self.sharing = sharing.name
        self._sharing = sharing

    async def share(self, num_bytes: int, *, peer: int | None = None) -> SharedMemory:
        """Make memory that another process can open by its ``fields``.

        Args:
            num_bytes: its size.
            peer: the rank that it is for.

        Raises:
            OSError: there is none; says why.
        """
        return await self._run("send", peer, lambda kept: self._sharing.allocate(num_bytes))

    def check_shared(self, fields: Mapping[str, Any]) -> int:
        """Refuse fields that no shared memory has. They come from the network.

        Args:
            fields: of the memory.

        Returns:
            Its size in bytes.

        Raises:
            FrameError: without a peer; names the field.
        """
        return self._sharing.check(fields)

    async def open_shared(self, fields: Mapping[str, Any], *, peer: int | None = None) -> SharedMemory:
        """Open another process's memory. It closes with these copies, if not before.

        Args:
            fields: checked ones.
            peer: the rank whose it is.

        Raises:
            OSError: it cannot be opened; says why.
        """
        opened = self._closing[self._lane_name("receive", peer)]

        def opening(kept: list[object]) -> SharedMemory:
            memory = self._sharing.open(fields)
            opened.append(memory)  # on the lane's thread, so that it closes also if nobody waits for it any more
            return memory

        return await self._run("receive", peer, opening)

    async def close_shared(
        self, memory: SharedMemory, *, is_open_elsewhere: bool = True, peer: int | None = None
    ) -> None:
        """Use memory of `share` or `open_shared` no more; after a read of it has returned.

        Args:
            memory: of `share`, if no other process reads it any more, or of `open_shared`.
            is_open_elsewhere: whether another process may have memory of `share` open.
            peer: the same rank.
        """
        opened = self._closing[self._lane_name("receive", peer)]
        direction = "send"
        if memory in opened:  # on the lane that reads it
            opened.remove(memory)
            direction = "receive"
        await self._run(direction, peer, lambda kept: memory.close(is_open_elsewhere=is_open_elsewhere))

    def close_at_end(self, memory: SharedMemory, *, peer: int | None = None) -> None:
        """Use memory of `share` no more, which no other process reads any more; it closes with these copies.

        Args:
            memory: as said.
            peer: the same rank.
        """
        self._closing[self._lane_name("send", peer)].append(memory)

    async def write(
        self, memory: SharedMemory, tensors: Sequence[Tensor], parts: Sequence[ByteRange], *, peer: int | None = None
    ) -> list[Tensor]:
        """Copy parts of tensors into shared memory.

        Args:
            memory: of `share`.
            tensors: complete ones that the device holds.
            parts: of them, and where in the memory.
            peer: the rank that reads them.

        Returns:
            The dense bytes of each tensor: in place of the tensors, for a call with further parts.
        """
        return await self._run("send", peer, partial(_written, memory, tensors, parts))

    async def read(
        self,
        memory: SharedMemory,
        specs: Sequence[Spec],
        parts: Sequence[ByteRange],
        into: Sequence[Tensor] | None = None,
        *,
        peer: int | None = None,
    ) -> list[Tensor]:
        """Copy parts of tensors out of shared memory.

        Args:
            memory: of `open_shared`.
            specs: dtype, shape and requires_grad of each tensor.
            parts: of them, and where in the memory.
            into: what the call with the first parts returned; None for that call.
            peer: the rank that wrote them.

        Returns:
            A dense leaf for each spec, in memory of its own on the device. They require no grad yet, since further
            parts may be written into them.
        """
        return await self._run("receive", peer, partial(_read, self._device, memory, specs, parts, into))


def _written(
    memory: SharedMemory, tensors: Sequence[Tensor], parts: Sequence[ByteRange], kept: list[object]
) -> list[Tensor]:
    flat = [_bytes_of(dense(tensor)) for tensor in tensors]
    kept += (tensors, flat)
    kept += [memory.write(part.place, flat[part.tensor][part.start : part.stop]) for part in parts]
    return flat


def _read(
    device: Device,
    memory: SharedMemory,
    specs: Sequence[Spec],
    parts: Sequence[ByteRange],
    into: Sequence[Tensor] | None,
    kept: list[object],
) -> list[Tensor]:
    if into is None:
        into = [device.empty(torch.empty(shape, dtype=dtype, device="meta")) for dtype, shape, _ in specs]
    kept += (into,)
    flat = list(map(_bytes_of, into))
    kept += [memory.read(part.place, flat[part.tensor][part.start : part.stop]) for part in parts]
    return list(into)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
