"""The contract of a device: streams that run work in order, and events that mark points in it.

Work is *issued* on a thread and *complete* when the device has run it. A stream runs its work in order; work of two
streams is ordered only where one waits for an event of the other. Memory belongs to the stream that first writes it. A
second stream that uses it must be noted by `Device.note_use`, or the memory is reused as soon as its last reference is
gone, while the second stream still needs it. Memory that two processes of a host see is an option of a device, such as
CUDA's IPC: `DeviceSharing`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor


class Event(ABC):
    """A point in the work of a stream. Its methods may be called on any thread."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block until the device has reached the point; other Python threads go on meanwhile.

        Raises:
            Exception: the device's error, if work before this point failed. The device is unusable from then on.
        """

    @abstractmethod
    def seconds_since(self, base: Event) -> float:
        """Seconds of the device's clock from ``base`` to this event. Both are timed, and have been reached."""

    @abstractmethod
    def release(self) -> None:
        """Give the event back for reuse; it must not be used afterwards."""


class Stream(ABC):
    """Work in order. Its methods may be called on any thread."""

    @abstractmethod
    def issuing(self) -> AbstractContextManager[None]:
        """Work issued in the block, on the calling thread, goes on this stream. Not reentrant.

        If the block ends with another stream current, this stream waits for the work issued on that one, and `strayed`
        becomes true.
        """

    @property
    @abstractmethod
    def strayed(self) -> bool:
        """Whether a block of `issuing` has ended with another stream current."""

    @abstractmethod
    def record(self, *, is_timed: bool = False) -> Event:
        """An event at the end of the work issued on this stream so far; without a time unless it is asked for."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Run work that is issued on this stream from now on behind ``event``. Does not block the thread."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of a device in bytes, as its allocator counts it."""

    #: In tensors now.
    allocated: int
    #: Held by the allocator now.
    reserved: int
    #: The most that was in tensors since the process began, or since its program reset the figure.
    peak: int


class Device(ABC):
    """One accelerator. Its methods may be called on any thread."""

    #: Its type, such as ``"cuda"``.
    kind: str
    #: Its type and index, such as ``"cuda:0"``.
    name: str
    #: Opens its memory to other processes of the host; None where that is impossible, as it is by default.
    sharing: DeviceSharing | None = None

    @abstractmethod
    def stream(self, *, is_urgent: bool = False) -> Stream:
        """A new stream. Work of urgent streams, which copy, goes before that of others."""

    @abstractmethod
    def current_stream(self) -> Stream:
        """The stream on which work issued on the calling thread goes."""

    @abstractmethod
    def holds(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` lies in this device's memory."""

    @abstractmethod
    def note_use(self, tensor: Tensor, stream: Stream) -> None:
        """Keep the memory of ``tensor`` from reuse until the work issued on ``stream`` when it is freed is complete.

        A device that has failed may be unable to free it, and then end the process: see `keep_noted`.
        """

    def keep_noted(self) -> None:  # noqa: B027 - where freeing is harmless, there is nothing to do
        """Never free what `note_use` has noted, nor host memory that copies may use: the device has failed.

        The first to find that out calls it at once; it may be called more than once.
        """

    @abstractmethod
    def empty(self, tensor: Tensor) -> Tensor:
        """A tensor in this device's memory with the shape and dtype of ``tensor``, contiguous and not initialised."""

    @abstractmethod
    def empty_on_host(self, tensor: Tensor) -> Tensor:
        """The same in host memory to and from which this device copies without blocking; pooled."""

    def pin(self, memory: Tensor) -> bool:
        """Turn host memory into such as `empty_on_host` makes; False where that is impossible, as it is by default."""
        return False

    def unpin(self, memory: Tensor) -> None:  # noqa: B027 - undoes nothing where nothing is pinned
        """Undo `pin`, before the memory is freed; no work uses it any more."""

    @abstractmethod
    def memory(self) -> DeviceMemory:
        """The memory in use now."""

    def explain(self, error: Exception) -> Exception:
        """The error of late work, with what helps to find its place."""
        return error


class CopyLane(Protocol):
    """Where copies are issued, one after the other, on a thread and a stream; `rrfp.compute.lanes.stream` has one."""

    def start(self) -> None:
        """Start the thread, on the event loop of all later futures."""

    def enqueue(self, call: Callable[[], Any]) -> asyncio.Future[Any]:
        """Make a call on the stream; the future gets an object with its ``result`` once the device has done its work.

        What the call returns stays referenced until then.
        """

    def close(self, last: Callable[[], object] | None = None) -> None:
        """Make no further call but ``last``, without waiting for it or a running one. May be called twice."""


class CopyLaneClass(Protocol):
    """Makes lanes."""

    def __call__(self, device: Device, name: str, *, is_urgent: bool, is_timed: bool) -> CopyLane:
        """A lane on a stream of its own, whose work goes before that of others if it is urgent.

        Where it is timed, executions have the device's times.
        """


class ByteRange(NamedTuple):
    """Bytes ``start`` to ``stop`` of a tensor, at a ``place`` of shared memory."""

    tensor: int
    start: int
    stop: int
    place: int


class SharedMemory(ABC):
    """Memory of this process's device that others may open, or another's that is open here.

    `write` and `read` issue a copy on the current stream, as work of the thread's block of `Stream.issuing`. No stream
    orders what two processes do: one of them tells the other when its copy is complete.

    Attributes:
        num_bytes: its size.
        fields: plain data by which another process opens it.
    """

    num_bytes: int
    fields: Mapping[str, Any]

    @abstractmethod
    def write(self, start: int, source: Tensor) -> object:
        """Copy the bytes of ``source``, flat and on the device, to the byte ``start``.

        Returns what must stay referenced until the copy is complete.
        """

    @abstractmethod
    def read(self, start: int, target: Tensor) -> object:
        """The same from the byte ``start`` into ``target``."""

    @abstractmethod
    def close(self, *, is_open_elsewhere: bool = True) -> None:
        """Use the memory no more. Called once, on a thread that may wait for the device.

        Of this process's own: no other process reads it any more, and none has it open unless ``is_open_elsewhere``.
        """


class DeviceSharing(ABC):
    """Makes memory of one device that other processes of the host open, and opens theirs.

    `allocate` and `open` are called in a block of a stream, seldom: between two processes once.
    """

    #: Of the way; both ends must have the same.
    name: str

    @abstractmethod
    def allocate(self, num_bytes: int) -> SharedMemory:
        """New memory, outside of the allocator of tensors; an OSError says why there is none."""

    @abstractmethod
    def check(self, fields: Mapping[str, Any]) -> int:
        """The size of the memory that another process's ``fields`` describe; a FrameError without a peer if none do.

        They come from the network: this sees them before anything else does.
        """

    @abstractmethod
    def open(self, fields: Mapping[str, Any]) -> SharedMemory:
        """The memory of checked ``fields``; an OSError says why it cannot be opened."""
