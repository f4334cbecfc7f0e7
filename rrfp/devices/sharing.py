"""Memory of a device that two processes of a host see: an option of a device, such as CUDA's IPC."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor


class Part(NamedTuple):
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
