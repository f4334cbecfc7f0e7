"""Reused memory for large received tensors.

A copy into fresh memory runs at a tenth of the speed of one into memory that was written before, because the kernel
clears every page first. So the memory of a received tensor is reused once the last reference to the tensor is gone.
Sizes repeat from microbatch to microbatch, hence one stack of buffers for each size; when too much is idle, the least
recently used size is evicted first.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from functools import partial
from typing import Any

import torch

from rrfp.transports.wire.tensor_bytes import allocate

#: Smaller buffers come from the allocator, which keeps them warm by itself.
POOLED_FROM_BYTES = 256 << 10

_PAGE = 4096


class BufferPool:
    """Lends memory, and gets it back when the borrower drops its last reference; no call returns it.

    Args:
        idle_bytes: the most memory kept for reuse.
    """

    def __init__(self, idle_bytes: int = 256 << 20) -> None:
        self._limit = idle_bytes
        self._idle: OrderedDict[int, list[torch.Tensor]] = OrderedDict()
        self._idle_bytes = 0
        # Garbage collection may drop a borrower's reference in any thread at any allocation, also in this thread while
        # it holds the lock: hence reentrant.
        self._lock = threading.RLock()
        self._lent: dict[int, weakref.ref[Any]] = {}

    @property
    def idle_bytes(self) -> int:
        """Memory kept for reuse now."""
        return self._idle_bytes

    def acquire(self, num_bytes: int) -> memoryview:
        """Writable memory, aligned to 64 bytes, not initialised; lent until nothing refers to it.

        Args:
            num_bytes: its size.
        """
        if num_bytes < POOLED_FROM_BYTES:
            return allocate(num_bytes)
        size = -(-num_bytes // _PAGE) * _PAGE
        memory = self._pop(size)
        if memory is None:
            memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        # A tensor made from the view keeps this array object alive, so the array's end means that the memory is free.
        array: Any = memory.numpy()
        reference = weakref.ref(array, partial(self._release, memory))
        with self._lock:
            self._lent[id(reference)] = reference
        return memoryview(array)[:num_bytes]

    def _pop(self, size: int) -> torch.Tensor | None:
        with self._lock:
            stack = self._idle.get(size)
            if not stack:
                return None
            self._idle_bytes -= size
            self._idle.move_to_end(size)
            return stack.pop()

    def _release(self, memory: torch.Tensor, reference: weakref.ref[Any]) -> None:
        size = memory.numel()
        with self._lock:
            self._lent.pop(id(reference), None)
            if size > self._limit:
                return
            self._idle.setdefault(size, []).append(memory)
            self._idle.move_to_end(size)
            self._idle_bytes += size
            while self._idle_bytes > self._limit:
                self._evict()

    def _evict(self) -> None:
        size, stack = next(iter(self._idle.items()))
        if stack:
            stack.pop()
            self._idle_bytes -= size
        if not stack:
            del self._idle[size]
