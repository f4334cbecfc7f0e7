"""Slots that are lent before `send`: a device copies a message's tensors straight into them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rrfp.transports.shm.slot_pool import SlotPool
from rrfp.transports.shm.slots import Slot


class SlotLoan:
    """One slot for the tensors of one message, of these ``sizes``; see `rrfp.transports.lending.Loan`."""

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
        """Drop the slot unless it was accepted: a device may still write to it, so no other message may use it."""
        if not self._is_open:
            return
        self._is_open = False
        if self.slot.descriptor is None:
            self._pool.drop(self.slot)
        else:
            self._pool.forget(self.slot)


def is_same(target: memoryview, frame: memoryview) -> bool:
    """Whether two views are of the same memory."""
    return frame.nbytes > 0 and _address(target) == _address(frame)


def _address(view: memoryview) -> Any:
    return np.asarray(view).__array_interface__["data"][0]
