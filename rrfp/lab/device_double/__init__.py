"""An asynchronous device on a CPU: to test, without a GPU, the code that drives one.

Operators issued on a stream of `DoubleDevice` compute at once. When the block ends, every storage that they wrote is
covered: its bytes are put aside and 0xFF (NaN, -1) stands in their place, until the device has "run" the block, some
time later. A stream runs its work in order. While a block issues work on a stream, exactly that pending work is
uncovered which the stream's order implies: its own, and that of other streams before the events that it waited for. So
who reads too early reads garbage: another stream without an event, a transport, the loop, the caller. Threads may be
in blocks of different streams at the same time, as on a device; then what one of them uncovers is uncovered for all.

A race need not show in results, less so between such threads. So the device also looks for some and reports them in
`DoubleDevice.problems`:

- a block uses memory that pending work of another stream writes, or writes memory that such work reads;
- memory that pending work reads, and that its stream did not make, is freed without `Device.note_use`, or written to;
- memory that pending work writes is written to by the host;
- an event is used after its release, or its time before it was reached, or without having one;
- memory that was noted, or is for copies, is freed after the device has failed and before `DoubleDevice.keep_noted`.

All tensors are on the CPU. To the device every one lies in its memory, except those from `DoubleDevice.empty_on_host`:
so `holds` is true of parameters and inputs, as on a GPU to which everything was moved.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from rrfp.devices.base import Device, DeviceMemory, DeviceSharing, SharedMemory, Stream
from rrfp.errors import ConfigError, FrameError
from rrfp.lab.device_double.memory import Memory
from rrfp.lab.device_double.stream import DoubleStream, Issuer
from rrfp.lab.device_double.timeline import DoubleError, DoubleEvent, Timeline
from rrfp.plain import Reader, fields_of, whole

__all__ = ["DoubleDevice", "DoubleError", "DoubleEvent", "DoubleSharing", "DoubleStream"]


class DoubleMemory(SharedMemory):
    """A part of the double's memory that is a memfd, which other processes map; or another process's.

    Each copy has a storage of its own over the bytes that it concerns, so that only these are covered while it is
    pending: another process that reads them too early reads 0xFF.
    """

    def __init__(self, descriptor: int, num_bytes: int, fields: Mapping[str, Any], *, is_own: bool) -> None:
        self.num_bytes = num_bytes
        self.fields = fields
        self._closing = weakref.finalize(self, os.close, descriptor)
        self._map = mmap.mmap(descriptor, num_bytes)
        self._is_own = is_own
        self._used = 0

    def write(self, start: int, source: Tensor) -> object:
        self._used = max(self._used, start + source.nbytes)
        piece = self._piece(start, source.nbytes)
        piece.copy_(source, non_blocking=True)
        return piece

    def read(self, start: int, target: Tensor) -> object:
        piece = self._piece(start, target.nbytes)
        target.copy_(piece, non_blocking=True)
        return piece

    def _piece(self, start: int, num_bytes: int) -> Tensor:
        array: Any = np.frombuffer(self._map, np.uint8, num_bytes, start)
        with _disable_current_modes():  # else the memory would count as made by the stream whose block this is
            return torch.from_numpy(array)

    def close(self, *, is_open_elsewhere: bool = True) -> None:
        """See `SharedMemory.close`. As another program's use of it would, this overwrites the memory with 0xFF."""
        if self._is_own:
            np.frombuffer(self._map, np.uint8, self._used).fill(0xFF)
        self._closing()


class DoubleSharing(DeviceSharing):
    """The double's memory for other processes. What is open stays mapped after the death of its owner."""

    name = "double"

    def allocate(self, num_bytes: int) -> SharedMemory:
        descriptor = os.memfd_create("rrfp-device-double", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, num_bytes)
        inode = os.fstat(descriptor).st_ino
        fields = {"process": os.getpid(), "descriptor": descriptor, "inode": inode, "size": num_bytes}
        return DoubleMemory(descriptor, num_bytes, fields, is_own=True)

    def check(self, fields: Mapping[str, Any]) -> int:
        positive = partial(whole, least=1)
        readers: dict[str, Reader] = {"process": positive, "descriptor": whole, "inode": whole, "size": positive}
        size: int = fields_of(fields, readers, error=partial(FrameError, None))["size"]
        return size

    def open(self, fields: Mapping[str, Any]) -> SharedMemory:
        descriptor = os.open(f"/proc/{fields['process']}/fd/{fields['descriptor']}", os.O_RDWR | os.O_CLOEXEC)
        status = os.fstat(descriptor)
        if (status.st_ino, status.st_size) != (fields["inode"], fields["size"]):
            os.close(descriptor)
            raise OSError("the memory was released")
        return DoubleMemory(descriptor, fields["size"], fields, is_own=False)


_serial = itertools.count()


class DoubleDevice(Device):
    """See the package's docstring. A context manager: on leaving it is closed.

    Threads issue on streams of their own at the same time, so calls on lanes of one device may wait for each other.

    Args:
        seconds: how long the device takes for a block, or for a part of one that ends at an event: a number, or a
            function of the count of blocks before. A block without operators on tensors takes no time.
        locked_s: how long a call, such as one that records an event, holds the interpreter's lock.
        can_pin: whether host memory can be pinned.

    Attributes:
        problems: the races found so far, a line each.
        pinned: address and bytes of the host memory that `pin` made the device's.

    Raises:
        ConfigError: if ``seconds`` is a negative number.
    """

    kind = "double"
    sharing: DeviceSharing

    def __init__(
        self, seconds: float | Callable[[int], float] = 0.001, *, locked_s: float = 0.0, can_pin: bool = True
    ) -> None:
        if not callable(seconds) and not seconds >= 0:
            raise ConfigError(f"seconds is {seconds!r}, must be a number >= 0, or a function of the count of blocks")
        self.name = f"double:{next(_serial)}"
        self.problems: list[str] = []
        self.pinned: list[tuple[int, int]] = []
        self.sharing = DoubleSharing()
        self._seconds = seconds
        self._can_pin = can_pin
        self._streams = itertools.count()
        self._count = 0
        #: The work that fails, counted from the first.
        self._failing: int | None = None
        self._memory = Memory(self.problems.append)
        self._timeline = Timeline(self._memory.complete, self._memory.fail, locked_s)
        self._issuer = Issuer(self._timeline, self._memory, self._next_work, self.problems.append)
        self._of_thread = threading.local()

    def __enter__(self) -> DoubleDevice:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Run all work at once, now and later, and end the device's thread."""
        self._timeline.close()
        with self._timeline.changed:
            self._memory.close()

    def fail(self, *, after: int = 1, everywhere: bool = False) -> None:
        """Let the device break at the ``after``-th block issued from now on.

        No event behind that block, or behind any block that the device has not run then, is reached any more: waiting
        for one raises `DoubleError`, and so does issuing work.

        Args:
            after: how many blocks are issued until then, that one included.
            everywhere: whether every call then fails, on each thread, as on CUDA: also waiting for events that were
                reached before, and making memory. So a task that was complete may be named.
        """
        with self._timeline.changed:
            self._failing = self._count + after
            self._timeline.is_broken_everywhere = everywhere

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

    def keep_noted(self) -> None:
        """See :meth:`Device.keep_noted`; until the device is closed."""
        with self._timeline.changed:
            self._memory.keep_noted()

    def empty(self, tensor: Tensor) -> Tensor:
        """See :meth:`Device.empty`. Outside a block, the memory is that of the thread's stream."""
        self._timeline.call(works_on_broken=True)
        made = torch.empty(tensor.shape, dtype=tensor.dtype)
        self._issuer.allocate(made, self.current_stream())
        return made

    def empty_on_host(self, tensor: Tensor) -> Tensor:
        """See :meth:`Device.empty_on_host`. Its reuse is safe only when the work that uses it is complete."""
        self._timeline.call(works_on_broken=True)
        made = torch.empty(tensor.shape, dtype=tensor.dtype)
        self._issuer.allocate(made, None)
        return made

    def pin(self, memory: Tensor) -> bool:
        """See :meth:`Device.pin`; `pinned` lists it."""
        if not self._can_pin or self._timeline.error is not None:
            return False
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
