"""Slots: shared memory for the tensors of one message, mapped once by its sender and once by its receiver.

A slot is a memfd of its own, sealed at its size: no process can shrink it under another one that maps it, which would
be SIGBUS there. It needs no file, no /dev/shm and no cleaner: the kernel frees it with its last mapping, also after
SIGKILL. The descriptor travels with the slot's first message; a mapping needs none, so slots do not count against
RLIMIT_NOFILE.

The first byte says whether the slot is lent. The sender sets it before it announces a message; the receiver clears it
when nothing refers to the message's tensors any more. So giving back costs no message, and may happen in any thread.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import resource
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rrfp.transports.wire.tensor_bytes import ALIGNMENT

#: The state byte has a cache line of its own, so that the tensors after it are aligned.
HEAD_BYTES = ALIGNMENT

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_FREE, _LENT = 0, 1

_PAGE = 4096

#: How torch's error ends its first line: the text of an errno, and its number.
_ERROR_NUMBER = re.compile(r"\((\d+)\)$", re.MULTILINE)


def with_limit(error: OSError) -> str:
    """The text of ``error``, with the limit behind it."""
    limit = {
        errno.EMFILE: f"RLIMIT_NOFILE is {_soft_limit(resource.RLIMIT_NOFILE)}; ulimit -n",
        errno.ENFILE: "all processes of this system together have as many files open as /proc/sys/fs/file-max allows",
        errno.EFBIG: f"RLIMIT_FSIZE is {_soft_limit(resource.RLIMIT_FSIZE)} bytes; ulimit -f",
        errno.ENOMEM: f"the memory of this machine or cgroup is full, or RLIMIT_AS, {_soft_limit(resource.RLIMIT_AS)}",
        errno.ENOSPC: "the memory of this machine or cgroup is full",
    }.get(error.errno or 0)
    return f"{error} ({limit})" if limit else str(error)


def _soft_limit(which: int) -> str:
    limit = resource.getrlimit(which)[0]
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)


def obstacle_of_limits(num_bytes: int) -> str:
    """Why no message of ``num_bytes`` could have a slot; empty if it could."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit == resource.RLIM_INFINITY or limit >= HEAD_BYTES + size_class(num_bytes):
        return ""
    return f"RLIMIT_FSIZE is {limit} bytes (ulimit -f), and max_message_bytes is {num_bytes}"


def size_class(num_bytes: int) -> int:
    """``num_bytes`` rounded up, by 12.5% at most, so that ragged messages share slots."""
    step = max(_PAGE, 1 << max(0, num_bytes.bit_length() - 4))
    return -(-num_bytes // step) * step


def padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class Slot:
    """One slot, as one of its two processes maps it."""

    def __init__(self, ident: int, num_bytes: int, descriptor: int | None, memory: Tensor) -> None:
        #: Unique among the slots of its sender, peer and channel.
        self.ident = ident
        #: Room for tensors.
        self.num_bytes = num_bytes
        #: Of the memfd, until the receiver has it.
        self.descriptor = descriptor
        # Closed at the latest with this object: a copy under way may outlive the connection.
        self._closing = None if descriptor is None else weakref.finalize(self, os.close, descriptor)
        #: When it was lent last, on the sender's loop.
        self.used_s = 0.0
        #: All of it, as a device pins it while anything refers to `registration`.
        self.memory = memory
        self.registration: object = None
        whole: Any = memory.numpy()
        self._array: Any = whole[HEAD_BYTES:]
        self._state = memoryview(whole)[:1]
        self._borrower: weakref.ref[Any] | None = None

    @classmethod
    def make(cls, ident: int, num_bytes: int) -> Slot:
        """A new slot, lent already; an OSError names the limit that was met."""
        descriptor = os.memfd_create(f"rrfp-{ident}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, HEAD_BYTES + num_bytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            memory = _map(descriptor, HEAD_BYTES + num_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        slot = cls(ident, num_bytes, descriptor, memory)
        slot.lend()
        return slot

    @classmethod
    def open(cls, ident: int, num_bytes: int, descriptor: int) -> Slot:
        """Map the slot of a peer's ``descriptor``; a ValueError if it is none."""
        size = os.fstat(descriptor).st_size
        if size != HEAD_BYTES + num_bytes:
            raise ValueError(f"has {size} bytes, must have {HEAD_BYTES + num_bytes}")
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        except OSError as error:
            raise ValueError("is no memfd") from error
        if seals & _SEALS != _SEALS:
            raise ValueError("is not sealed, and could shrink under this process")
        return cls(ident, num_bytes, None, _map(descriptor, size))

    def reserve(self) -> None:
        """Have the kernel reserve all memory: an OSError now, no SIGBUS later."""
        assert self.descriptor is not None
        os.posix_fallocate(self.descriptor, 0, HEAD_BYTES + self.num_bytes)

    def close_descriptor(self) -> None:
        if self._closing is not None:
            self._closing()
            self.descriptor = None

    @property
    def is_free(self) -> bool:
        """Whether the receiver has given it back, or never got it."""
        return self._state[0] == _FREE

    def lend(self) -> None:
        self._state[0] = _LENT

    def free(self) -> None:
        self._state[0] = _FREE

    @property
    def is_borrowed(self) -> bool:
        """Whether tensors of a message that was received here use the memory."""
        return self._borrower is not None and self._borrower() is not None

    def frames(self, sizes: Sequence[int]) -> list[memoryview]:
        return _cut(memoryview(self._array), sizes)

    def borrow(self, sizes: Sequence[int]) -> list[memoryview]:
        """The same for a receiver; free again when nothing refers to the memory."""
        # A new array object, whose end is the end of all views of it. When the process ends, its slots end too.
        whole = self._array.view()
        self._borrower = weakref.ref(whole)
        weakref.finalize(whole, partial(_give_back, self._state, os.getpid())).atexit = False
        return _cut(memoryview(whole), sizes)  # not slices of the array, which would refer to its memory only


def _map(descriptor: int, num_bytes: int) -> Tensor:
    """The shared memory of a memfd. Unlike `mmap.mmap`, torch's mapping keeps no descriptor."""
    try:
        return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=num_bytes, dtype=torch.uint8)
    except RuntimeError as error:
        failed = OSError(f"cannot map {num_bytes} bytes of shared memory: {error!s:.200}")
        if (number := _ERROR_NUMBER.search(str(error))) is not None:
            failed.errno = int(number[1])
        raise failed from error


def _cut(memory: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    views, start = [], 0
    for size in sizes:
        views.append(memory[start : start + size])
        start += padded(size)
    return views


def _give_back(state: memoryview, process: int) -> None:
    # A forked child has copies of the tensors, and its end must not free what the parent still reads.
    if os.getpid() == process:
        state[0] = _FREE
