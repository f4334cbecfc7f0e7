"""The storages that work on the double reads and writes: who made them, who uses them, and what covers them."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

#: So many bytes of a storage are compared, to find writes by the host.
LOOKED_AT = 1 << 16

#: For each stream, by number, how many blocks of it come before a point.
Clock = dict[int, int]


@dataclass(slots=True, eq=False)
class Work:
    """A block that was issued, or the part of one before an event."""

    #: The number of its stream.
    stream: int
    #: Its place in the stream, from 1.
    number: int
    #: Names it in problems.
    label: str
    #: Its duration on the device.
    seconds: float
    #: Whether the device breaks at it.
    fails: bool = False
    #: The storages that it reads.
    uses: list[Region] = field(default_factory=list)
    #: Those that its stream did not make.
    reads: list[Reading] = field(default_factory=list)
    writes: list[Region] = field(default_factory=list)
    is_done: bool = False
    #: When it ends, once it has begun.
    ends: float | None = None

    def is_before(self, clock: Clock) -> bool:
        """Whether the order that ``clock`` describes implies that the work is complete."""
        return self.is_done or clock.get(self.stream, 0) >= self.number


@dataclass(slots=True, eq=False)
class Region:
    """One storage."""

    #: To it. As long as the region lives, no other storage has its key.
    ref: StorageWeakRef
    num_bytes: int
    #: The stream that made it, to which it returns when it is freed; None for one made by the host.
    owner: int | None = None
    #: Whether it was made outside blocks, for a stream that may make more of it at any time.
    is_outside: bool = False
    is_on_host: bool = False
    #: The streams for whose use `Device.note_use` keeps it.
    noted: set[int] = field(default_factory=set)
    #: Pending work that reads it.
    readers: set[Work] = field(default_factory=set)
    #: Pending work that writes it.
    writers: set[Work] = field(default_factory=set)
    #: Blocks under way that may see it; meanwhile nothing covers it.
    viewers: set[object] = field(default_factory=set)
    #: Its address and its bytes, while 0xFF stands in their place.
    kept: tuple[int, bytes] | None = None
    #: How often issued work has written it.
    writes: int = 0

    @property
    def is_noted(self) -> bool:
        """Whether the device frees it in a special way: another stream, or a copy, may use it."""
        return bool(self.noted) or self.is_on_host

    @property
    def is_freed(self) -> bool:
        """Whether the last reference to the storage is gone."""
        return bool(self.ref.expired())  # type: ignore[no-untyped-call]

    def storage(self) -> torch.UntypedStorage | None:
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self.ref.cdata)
        return storage

    def cover(self) -> None:
        if (storage := self.storage()) is not None and self.kept is None:
            pointer, size = storage.data_ptr(), storage.nbytes()
            self.kept = pointer, ctypes.string_at(pointer, size)
            ctypes.memset(pointer, 0xFF, size)

    def uncover(self) -> bool:
        """Put the bytes back; False if the covering ones have changed."""
        if self.kept is None:
            return True
        pointer, kept = self.kept
        self.kept, storage = None, self.storage()
        if storage is None or (storage.data_ptr(), storage.nbytes()) != (pointer, len(kept)):
            return True  # freed, or resized
        looked_at = min(len(kept), LOOKED_AT)
        is_intact = ctypes.string_at(pointer, looked_at) == b"\xff" * looked_at
        ctypes.memmove(pointer, kept, len(kept))
        return is_intact

    def checksum(self) -> int | None:
        """Of the first bytes; None where they do not stand there."""
        if self.kept is not None or (storage := self.storage()) is None:
            return None
        return zlib.crc32(ctypes.string_at(storage.data_ptr(), min(storage.nbytes(), LOOKED_AT)))


@dataclass(slots=True, eq=False)
class Reading:
    """A storage as a piece of work reads it."""

    region: Region
    #: The first one that reads it.
    operator: str
    #: Of its bytes at the end of the block.
    checksum: int | None = None
    #: How often issued work had written it then.
    writes: int = 0


class Regions:
    """All storages that the device knows. Not thread-safe."""

    def __init__(self) -> None:
        self._regions: dict[int, Region] = {}
        self.peak = 0

    def __iter__(self) -> Iterator[Region]:
        return iter(self._regions.values())

    def of(self, tensor: Tensor) -> Iterator[tuple[int, Region]]:
        """Key and region of each storage of ``tensor``; unseen ones are the host's."""
        for storage in storages(tensor):
            key = storage._cdata
            region = self._regions.get(key)
            if region is None:
                region = self._regions[key] = Region(_reference(storage), storage.nbytes())
            yield key, region

    def sweep(self) -> int:
        """Forget freed storages; returns the bytes of living device memory."""
        freed = [key for key, region in self._regions.items() if region.is_freed and not region.readers]
        for key in freed:
            del self._regions[key]
        allocated = sum(region.num_bytes for region in self if region.owner is not None and not region.is_freed)
        self.peak = max(self.peak, allocated)
        return allocated


def _reference(storage: torch.UntypedStorage) -> StorageWeakRef:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The CPU storages of ``tensor``: several of a sparse, none of a fake one."""
    if tensor.layout is torch.sparse_coo:
        yield from storages(tensor._indices())
        yield from storages(tensor._values())
        return
    if tensor.device.type != "cpu":
        return
    try:
        storage = tensor.untyped_storage()
        if storage.device.type == "cpu" and storage.nbytes() and storage.data_ptr():
            yield storage
    except (NotImplementedError, RuntimeError):
        return  # opaque or without data
