"""Warm memory for large received tensors.

A copy into fresh memory runs at a tenth of the speed of one into warm memory, because the kernel clears every page
first. So memory of received tensors is used again once nobody refers to the tensor any more. Sizes repeat from
microbatch to microbatch, hence one stack of buffers a size, and the least recently used size goes first when too much
lies idle.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from functools import partial
from typing import Any

import torch

from rrfp.transports.tensor_bytes import allocate

#: Smaller buffers come from the allocator, which keeps them warm by itself.
POOLED_FROM_BYTES = 256 << 10

_PAGE = 4096


class BufferPool:
    """Lends memory and takes it back when the borrower's last reference goes.

    Args:
        idle_bytes: most memory kept while nobody uses it.
    """

    def __init__(self, idle_bytes: int = 256 << 20) -> None:
        self._limit = idle_bytes
        self._idle: OrderedDict[int, list[torch.Tensor]] = OrderedDict()
        self._idle_bytes = 0
        # A lender's reference may go in any thread, at any allocation, also while this lock is held: hence reentrant.
        self._lock = threading.RLock()
        self._lent: dict[int, weakref.ref[Any]] = {}

    @property
    def idle_bytes(self) -> int:
        """Memory kept for reuse now."""
        return self._idle_bytes

    def take(self, num_bytes: int) -> memoryview:
        """Writable memory of ``num_bytes``, aligned to 64 bytes, not initialised; lent until nothing refers to it."""
        if num_bytes < POOLED_FROM_BYTES:
            return allocate(num_bytes)
        size = -(-num_bytes // _PAGE) * _PAGE
        memory = self._pop(size)
        if memory is None:
            memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        # The array object is what a tensor made from the view keeps alive; its end is the sign that the memory is free.
        array: Any = memory.numpy()
        reference = weakref.ref(array, partial(self._give_back, memory))
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

    def _give_back(self, memory: torch.Tensor, reference: weakref.ref[Any]) -> None:
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
