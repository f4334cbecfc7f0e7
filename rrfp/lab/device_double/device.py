"""`DoubleDevice`: a device for the runtime, on the CPU's memory."""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from rrfp.devices.base import Device, DeviceMemory, Stream
from rrfp.devices.sharing import DeviceSharing, check_fields, integer
from rrfp.errors import ConfigError
from rrfp.lab.device_double.memory import Memory
from rrfp.lab.device_double.stream import DoubleStream, Issuer
from rrfp.lab.device_double.timeline import Timeline


class _Shared:
    """Bytes in a memfd that stay as they are while anything refers to this object."""

    def __init__(self, num_bytes: int) -> None:
        self.descriptor = os.memfd_create("rrfp-device-double", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, num_bytes)
        self.inode = os.fstat(self.descriptor).st_ino
        self.content = _map(self.descriptor, num_bytes)
        # A forked child maps the same memory, and must not overwrite it when it ends.
        weakref.finalize(self, _reuse, self.content, self.descriptor, os.getpid()).atexit = False


def _map(descriptor: int, num_bytes: int) -> Tensor:
    array: Any = np.frombuffer(mmap.mmap(descriptor, num_bytes), np.uint8)
    with _disable_current_modes():  # else the memory would count as made by the stream whose block this is
        return torch.from_numpy(array)


def _reuse(content: Tensor, descriptor: int, process: int) -> None:
    if os.getpid() == process:
        content.numpy().fill(0xFF)  # not by torch, to which a dispatch mode may listen
        os.close(descriptor)


class DoubleSharing(DeviceSharing):
    """The double's memory for other processes: a copy in a memfd, which both ends map.

    The copy is work of the stream on which it is issued, so a process that opens it too early reads 0xFF. When its
    owner drops it, it is overwritten with 0xFF at once, as a GPU's allocator may reuse memory: a stream that still
    reads it, or reads a dropped copy that it opened, shows in values or among the double's problems. An opened copy
    stays mapped after the death of its owner.
    """

    name = "double"

    def share(self, tensor: Tensor) -> tuple[dict[str, Any], object]:
        """See `DeviceSharing.share`."""
        shared = _Shared(tensor.nbytes)
        shared.content.copy_(tensor.reshape(-1).view(torch.uint8))
        fields = {"process": os.getpid(), "descriptor": shared.descriptor, "inode": shared.inode}
        return {**fields, "length": tensor.nbytes}, shared

    def check(self, fields: Mapping[str, Any], num_bytes: int) -> None:
        """See `DeviceSharing.check`."""
        check_fields(
            fields,
            {
                "process": integer(1),
                "descriptor": integer(),
                "inode": integer(),
                "length": integer(num_bytes, num_bytes),
            },
        )

    def open(self, fields: Mapping[str, Any]) -> Tensor:
        """See `DeviceSharing.open`."""
        descriptor = os.open(f"/proc/{fields['process']}/fd/{fields['descriptor']}", os.O_RDWR | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if (status.st_ino, status.st_size) != (fields["inode"], fields["length"]):
                raise OSError("the memory was released")
            return _map(descriptor, fields["length"])
        finally:
            os.close(descriptor)


_serial = itertools.count()


class DoubleDevice(Device):
    """See the package's docstring. A context manager: on leaving it is closed.

    Threads issue on streams of their own at the same time, so calls on lanes of one device may wait for each other.

    Args:
        seconds: how long the device takes for a block, or for a part of one that ends at an event: a number, or a
            function of the count of blocks before. A block without operators on tensors takes no time.

    Attributes:
        problems: the races found so far, a line each.
        pinned: address and bytes of the host memory that `pin` made the device's.

    Raises:
        ConfigError: if ``seconds`` is a negative number.
    """

    kind = "double"
    sharing: DoubleSharing

    def __init__(self, seconds: float | Callable[[int], float] = 0.001) -> None:
        if not callable(seconds) and not seconds >= 0:
            raise ConfigError(f"seconds is {seconds!r}, must be a number >= 0, or a function of the count of blocks")
        self.name = f"double:{next(_serial)}"
        self.problems: list[str] = []
        self.pinned: list[tuple[int, int]] = []
        self.sharing = DoubleSharing()
        self._seconds = seconds
        self._streams = itertools.count()
        self._count = 0
        #: The work that fails, counted from the first.
        self._failing: int | None = None
        self._memory = Memory(self.problems.append)
        self._timeline = Timeline(self._memory.complete)
        self._issuer = Issuer(self._timeline, self._memory, self._next_work, self.problems.append)
        self._of_thread = threading.local()

    def __enter__(self) -> DoubleDevice:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Run all work at once, that of later calls included, and end the device's thread."""
        self._timeline.close()

    def fail(self, *, after: int = 1) -> None:
        """Let the device break at the ``after``-th block issued from now on.

        No event behind that block, or behind any block that the device has not run then, is reached any more: waiting
        for one raises `DoubleError`, and so does issuing work.

        Args:
            after: how many blocks are issued until then, that one included.
        """
        with self._timeline.changed:
            self._failing = self._count + after

    def stream(self, *, is_urgent: bool = False) -> Stream:
        """See :meth:`Device.stream`. Streams do not delay each other, so urgency makes no difference."""
        return self._new_stream()

    def current_stream(self) -> DoubleStream:
        """See :meth:`Device.current_stream`. Outside blocks every thread has a stream of its own.

        Nothing is issued on that one but in its own blocks: ``with device.current_stream().issuing(): x.fill_(3)`` is
        slow work of a caller.
        """
        if (current := self._issuer.current()) is not None:
            return current
        if not hasattr(self._of_thread, "stream"):
            self._of_thread.stream = self._new_stream()
        stream: DoubleStream = self._of_thread.stream
        return stream

    def holds(self, tensor: Tensor) -> bool:
        """See :meth:`Device.holds`: true unless `empty_on_host` made its memory."""
        if tensor.device.type != "cpu":
            return False
        with self._timeline.changed:
            return not any(region.is_on_host for _, region in self._memory.regions.of(tensor))

    def note_use(self, tensor: Tensor, stream: Stream) -> None:
        """See :meth:`Device.note_use`."""
        assert isinstance(stream, DoubleStream)
        with self._timeline.changed:
            self._memory.note_use(tensor, stream.number)

    def empty(self, tensor: Tensor) -> Tensor:
        """See :meth:`Device.empty`. Outside a block, the memory is that of the thread's stream."""
        made = torch.empty(tensor.shape, dtype=tensor.dtype)
        self._issuer.allocate(made, self.current_stream())
        return made

    def empty_on_host(self, tensor: Tensor) -> Tensor:
        """See :meth:`Device.empty_on_host`. Its reuse is safe only when the work that uses it is complete."""
        made = torch.empty(tensor.shape, dtype=tensor.dtype)
        self._issuer.allocate(made, None)
        return made

    def pin(self, memory: Tensor) -> bool:
        """See :meth:`Device.pin`; `pinned` lists it."""
        self.pinned.append((memory.data_ptr(), memory.nbytes))
        return True

    def unpin(self, memory: Tensor) -> None:
        """See :meth:`Device.unpin`."""
        self.pinned.remove((memory.data_ptr(), memory.nbytes))

    def memory(self) -> DeviceMemory:
        """See :meth:`Device.memory`: the bytes that blocks and `empty` have made; nothing is reserved beside them."""
        with self._timeline.changed:
            allocated = self._memory.regions.sweep()
            return DeviceMemory(allocated, allocated, self._memory.regions.peak)

    def _new_stream(self) -> DoubleStream:
        return DoubleStream(next(self._streams), self._issuer)

    def _next_work(self) -> tuple[float, bool]:
        self._count += 1
        seconds = self._seconds(self._count) if callable(self._seconds) else self._seconds
        return seconds, self._count == self._failing
