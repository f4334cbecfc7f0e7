"""The in-order banker: the memory rule for stages where branches of the graph join, right on every graph.

All ranks order microbatches by number. A stage knows how many slots each microbatch j still needs: one for each forward
that j has not started here (a skipped one does not count). A microbatch is *open* here while it holds slots or has
forwards to start. The forward of m may start iff afterwards every open microbatch j below it could
still start all its forwards here, if only what is held by j and by those above it counts:

    slots of all k >= j  +  forwards that j has to start  +  1  <=  slots of the stage        for each open j < m

Slots of microbatches below j do not count against j, since those end first. Nothing is assumed of the graph, the
placement, the hint or the sizes, and no message is needed. Backwards always run. D never passes the slots.

The rule asks nothing of m but its number, so it is one number: the lowest open microbatch that has no room to spare. Up
to this one microbatches may start, those above may not. So the lowest forward that is present may start if any may.

**Bytes**: the same sum in bytes, of those held and those that the forwards to start are expected to hold. The lowest
open microbatch may always start, so wrong expectations lead beyond the limit and not to a deadlock.

This is the banker's algorithm (Dijkstra, EWD 108) with the order of the customers given in advance, so that one pass
over them decides. docs/memory-rules.md has the proof.

Rejected: slots by chunk (deadlocks), and a window of microbatches or a set of slots for the lowest one that all ranks
share (no deadlocks, but slower; and with skips the window lets D pass the limit).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from rrfp.memory.byte_limit import ByteLimit
from rrfp.memory.held_bytes import HeldBytes, Owner
from rrfp.memory.rules import MemoryRule, SlotCounts
from rrfp.memory.seen_sizes import SeenSizes


class BankerBytes(ByteLimit):
    """The rule in bytes; arguments as of `ByteLimit`."""

    def __init__(
        self,
        most: int,
        held: HeldBytes,
        seen: SeenSizes,
        visitors: Sequence[Collection[int]],
        **options: Any,
    ) -> None:
        super().__init__(most, held, seen, visitors, **options)
        #: By microbatch: the chunks where its forward has not started, and those where it holds bytes.
        self._to_start = _chunks_of(visitors)
        self._holding: list[set[int]] = [set() for _ in self._to_start]
        self._lowest_open = 0

    def fits(self, chunk: int, microbatch: int, *, is_lowest: bool) -> bool:
        """Whether every open microbatch below has room for the rest of its forwards, beside this one."""
        in_flight = sum(map(self._expected_in_flight, self._unreported))
        taken = (
            self._held.worst
            + in_flight
            + self._growth_to_come((chunk, microbatch))
            + self._expected((chunk, microbatch))
        )
        for below in range(self._lowest_open, microbatch):
            if self._is_open(below):
                if taken + self._rest_of(below) > self._most:
                    return False
                taken -= self._taken_by(below)
        return True

    def must_go_on(self, chunk: int, microbatch: int) -> bool:
        """False: the lowest open microbatch always fits."""
        return False

    def start(self, owner: Owner) -> None:
        super().start(owner)
        chunk, microbatch = owner
        self._to_start[microbatch].discard(chunk)
        self._holding[microbatch].add(chunk)

    def free(self, owner: Owner) -> None:
        """The microbatch is done on the chunk."""
        super().free(owner)
        chunk, microbatch = owner
        self._holding[microbatch].discard(chunk)
        while self._lowest_open < len(self._to_start) and not self._is_open(self._lowest_open):
            self._lowest_open += 1

    def _is_open(self, microbatch: int) -> bool:
        return bool(self._to_start[microbatch] or self._holding[microbatch])

    def _rest_of(self, microbatch: int) -> int:
        """What the forwards that the microbatch has to start here are expected to hold."""
        return sum(self._expected((chunk, microbatch)) for chunk in self._to_start[microbatch])

    def _taken_by(self, microbatch: int) -> int:
        """What the microbatch holds here, with what its forwards in flight are expected to; its outputs aside."""
        owners = [(chunk, microbatch) for chunk in self._holding[microbatch]]
        in_flight = (self._expected_in_flight(owner) for owner in owners if owner in self._unreported)
        return sum(map(self._held.worst_of, owners)) + sum(in_flight)


class Banker(MemoryRule):
    """The in-order banker; arguments as of `MemoryRule`. Nothing else is reserved: the rule does that too."""

    __slots__ = ("_highest", "_holding", "_lowest_open", "_to_start")

    name = "banker"
    text = "a forward starts while every lower microbatch open on the stage keeps room for the rest of its forwards"
    is_by_number = True
    _byte_rule = BankerBytes

    def __init__(
        self, slots: int | None, most_bytes: int | None, visitors: Sequence[Collection[int]], **options: Any
    ) -> None:
        super().__init__(slots, most_bytes, visitors, **options)
        if self.slots is not None:
            self.roomy_below = min(self.roomy_below, self.slots - len(visitors))
        #: By microbatch: forwards to start, and slots held.
        self._to_start = [len(chunks) for chunks in _chunks_of(visitors)]
        self._holding = [0] * len(self._to_start)
        self._lowest_open = 0
        #: The highest microbatch that may start; None: not known since the last change.
        self._highest: float | None = None

    @classmethod
    def validate(cls, slots: int, counts: SlotCounts) -> str | None:
        """Every open microbatch has room for the rest of its forwards beside what it and higher ones hold."""
        if (wrong := super().validate(slots, counts)) is not None:
            return wrong
        taken = 0
        for microbatch in reversed(range(len(counts.to_start))):
            taken += counts.by_microbatch[microbatch]
            rest = counts.to_start[microbatch]
            if (counts.by_microbatch[microbatch] or rest) and taken + rest > slots:
                return (
                    f"leaves microbatch {microbatch} no room: {taken} held from it on and {rest} to start, of {slots}"
                )
        return None

    @property
    def full_at(self) -> int | None:
        """None: it depends on which microbatches hold the slots."""
        return None

    def allows(self, chunk: int, microbatch: int, lowest_unforwarded: int) -> bool:
        """Whether the forward of ``microbatch`` on local ``chunk`` may start now."""
        if self._highest is None:
            self._highest = self._find_highest()
        return microbatch <= self._highest and self._has_bytes(chunk, microbatch, is_lowest=True)

    def acquire(self, chunk: int, microbatch: int) -> None:
        """The forward of ``microbatch`` on ``chunk`` was enqueued: it takes a slot."""
        super().acquire(chunk, microbatch)
        self._to_start[microbatch] -= 1
        self._holding[microbatch] += 1
        self._highest = None

    def release_slot(self, microbatch: int) -> None:
        """The slot of ``microbatch`` on one chunk is free for what the lane runs next."""
        super().release_slot(microbatch)
        self._holding[microbatch] -= 1
        self._highest = None
        while self._lowest_open < len(self._to_start) and not self._is_open(self._lowest_open):
            self._lowest_open += 1

    def _is_open(self, microbatch: int) -> bool:
        return bool(self._to_start[microbatch] or self._holding[microbatch])

    def _find_highest(self) -> float:
        """The lowest open microbatch that has no room to spare here."""
        if self.slots is None:
            return math.inf
        taken, chunks = self.held, self._chunks
        for microbatch in range(self._lowest_open, len(self._to_start)):
            if taken + chunks < self.slots:
                break  # nor has any above it
            if self._is_open(microbatch) and taken + self._to_start[microbatch] >= self.slots:
                return microbatch
            taken -= self._holding[microbatch]
        return math.inf


def _chunks_of(visitors: Sequence[Collection[int]]) -> list[set[int]]:
    count = 1 + max((microbatch for microbatches in visitors for microbatch in microbatches), default=-1)
    return [{chunk for chunk, microbatches in enumerate(visitors) if m in microbatches} for m in range(count)]
