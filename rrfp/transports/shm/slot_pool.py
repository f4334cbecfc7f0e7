"""The slots of one channel to one peer: taken, filled and announced by the sender, given back by the receiver.

Not a ring: a receiver holds inputs until their backwards, in any order, so a ring of n slots would deadlock once it
holds n. Instead a slot is made whenever none is free. Their number is bounded from elsewhere: of the bytes in slots,
the window bounds those that `receive` has not returned, and the others are the receiver's activations. Sizes that
change from message to message add no more than `IDLE_BYTES`: before a slot is made, free ones beyond that are dropped.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from torch import Tensor

from rrfp.transports.shm.slots import Slot, size_class

#: Free slots beyond this many bytes are dropped, the least recently used first: before another one is made ...
IDLE_BYTES = 256 << 20

#: ... and once they were not used for so many seconds: between two steps all slots are free.
IDLE_S = 10.0


class SlotPool:
    """The slots of one channel to one peer. Used on one loop only."""

    def __init__(
        self,
        clock: Callable[[], float],
        on_dropped: Callable[[int], None],
        register: Callable[[Tensor], object],
        make_room: Callable[[], None],
    ) -> None:
        self._clock = clock
        self._on_dropped = on_dropped
        self._register = register
        self._make_room = make_room
        self._by_size: dict[int, deque[Slot]] = {}
        self._made = 0

    def acquire(self, num_bytes: int) -> Slot:
        """A slot with room for ``num_bytes``, lent; an OSError without memory."""
        size = size_class(num_bytes)
        slots = self._by_size.setdefault(size, deque())
        # In the order of their last use. Receivers give slots back in about that order.
        for index, slot in enumerate(slots):
            if slot.is_free:
                del slots[index]
                slot.lend()
                break
        else:
            self._make_room()
            self._made += 1
            slot = Slot.make(self._made, size)
            slot.registration = self._register(slot.memory)
        slot.used_s = self._clock()
        slots.append(slot)
        return slot

    def free_slots(self) -> list[Slot]:
        return [slot for slots in self._by_size.values() for slot in slots if slot.is_free]

    @property
    def num_bytes(self) -> int:
        """Of all slots, lent and free."""
        return sum(size * len(slots) for size, slots in self._by_size.items())

    def forget(self, slot: Slot) -> None:
        """Use a slot no more that the receiver does not know."""
        with suppress(KeyError, ValueError):  # `clear` was called
            self._by_size[slot.num_bytes].remove(slot)

    def take_back(self, ident: int) -> None:
        """Use a slot no more which the receiver could not map."""
        for slots in self._by_size.values():
            for slot in slots:
                if slot.ident == ident:
                    slots.remove(slot)
                    return

    def drop(self, slot: Slot) -> None:
        """Use a free slot no more, here and at the receiver."""
        self.forget(slot)
        self._on_dropped(slot.ident)

    def clear(self) -> None:
        """Forget all. What the receiver holds stays valid there."""
        self._by_size.clear()


def drop_surplus(pools: list[SlotPool], unused_since_s: float = math.inf) -> None:
    """Drop free slots beyond `IDLE_BYTES` that were not used since a time."""
    free = [(slot.used_s, index, slot) for index, pool in enumerate(pools) for slot in pool.free_slots()]
    excess = sum(slot.num_bytes for *_, slot in free) - IDLE_BYTES
    for used_s, index, slot in sorted(free, key=lambda entry: entry[0]):
        if excess <= 0 or used_s > unused_since_s:
            return
        pools[index].drop(slot)
        excess -= slot.num_bytes


class SlotLoan:
    """One slot for the tensors of one message, of these ``sizes``; see `rrfp.transports.base.Loan`."""

    def __init__(self, slot: Slot, sizes: Sequence[int], pool: SlotPool) -> None:
        self.slot = slot
        self.frames = slot.frames(sizes)
        self._sizes = list(sizes)
        self._pool = pool
        self._is_open = True

    def accept(self, frames: Sequence[memoryview]) -> bool:
        """Whether ``frames`` are the message's; the slot is the caller's then."""
        fits = self._is_open and [frame.nbytes for frame in frames] == self._sizes
        if not (fits and any(map(is_same, self.frames, frames))):
            return False
        self._is_open = False
        return True

    def close(self) -> None:
        """Drop the slot unless it was accepted: a device may still write to it."""
        if not self._is_open:
            return
        self._is_open = False
        if self.slot.descriptor is None:
            self._pool.drop(self.slot)
        else:
            self._pool.forget(self.slot)


def is_same(target: memoryview, frame: memoryview) -> bool:
    return frame.nbytes > 0 and _address(target) == _address(frame)


def _address(view: memoryview) -> Any:
    return np.asarray(view).__array_interface__["data"][0]
