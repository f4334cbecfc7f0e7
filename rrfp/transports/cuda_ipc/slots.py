"""A P2P channel over slots: parts of a device's memory that the peer has open, some of each end's.

The sender copies tensors into a free slot of its own and announces it; the receiver copies them out at once, whatever
its rank does, and gives the slot back. Both copies are made on one device each. What fits into no slot goes in pieces,
each with a slot of its own, so that the memory is bounded, and nothing is allocated or opened after the start.

Rejected: the logic of shm's slots. There the receiver uses the memory in place until a backward, so the sender makes
another slot where none is free; here it waits for one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from rrfp.devices.base import ByteRange, SharedMemory
from rrfp.devices.copies import SharesDeviceMemory
from rrfp.errors import FrameError, RrfpError, TransportClosedError
from rrfp.plain import whole
from rrfp.transports.base import Channel, Plain
from rrfp.transports.links.flow import CLOSED, background
from rrfp.transports.tunnel.link import TunnelLink
from rrfp.transports.tunnel.p2p import ENTRY, Transfer, entry_of
from rrfp.transports.wire.header_checks import HeaderChecks, TensorSpec

#: Slots for each peer and direction: while one is read, the next ones are written.
SLOTS = 4

MIN_SLOT_BYTES = 64 << 10

#: Tensors begin at multiples of it, so that copies are as wide as a device makes them.
_ALIGNMENT = 512


def room_of_slots(queue_bytes: int) -> int:
    """The bytes of a slot; all slots together have ``queue_bytes``."""
    return max(MIN_SLOT_BYTES, queue_bytes // SLOTS // _ALIGNMENT * _ALIGNMENT)


@dataclass(frozen=True, slots=True)
class Slots:
    """The slots of this rank and of a peer, and the room of each slot."""

    own: SharedMemory
    own_room: int
    other: SharedMemory
    other_room: int


def cut(sizes: Sequence[int], room: int) -> Iterator[list[ByteRange]]:
    """Tensors of these ``sizes`` in pieces of a slot each; both ends cut alike."""
    piece: list[ByteRange] = []
    place = 0
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            if place >= room:
                yield piece
                piece, place = [], 0
            stop = min(size, start + room - place)
            piece.append(ByteRange(index, start, stop, place))
            place += -(-(stop - start) // _ALIGNMENT) * _ALIGNMENT
            start = stop
    if piece:
        yield piece


def _in_slot(parts: Sequence[ByteRange], slot: int, room: int) -> list[ByteRange]:
    return [part._replace(place=slot * room + part.place) for part in parts]


class SlotChannel:
    """See `P2PChannel`. Its entries: a slot that is free again; or [number, slot], a transfer's next piece."""

    def __init__(self, slots: Slots, copies: SharesDeviceMemory, link: TunnelLink) -> None:
        self._slots = slots
        self._copies = copies
        self._link = link
        self._peer = link.peer
        self._check = HeaderChecks(link.peer)
        self._error: RrfpError | None = None
        self._is_closed = False
        #: Own slots: those that the peer has, and the free ones, with a None once the channel has ended.
        self._lent: set[int] = set()
        self._free: asyncio.Queue[int | None] = asyncio.Queue()
        for slot in range(slots.own.num_bytes // slots.own_room):
            self._free.put_nowait(slot)
        #: The peer's slots that are being read; and by number of a transfer, those with its next pieces.
        self._reading: set[int] = set()
        self._filled: dict[int, asyncio.Queue[int]] = {}
        self._tasks: set[asyncio.Task[list[Tensor]]] = set()

    # Sending.

    def moves(self, tensor: Tensor) -> bool:
        return self._copies.holds(tensor)

    async def prepare(self, tensors: Sequence[Tensor]) -> Transfer:
        """The first piece lies in a slot then."""
        pieces = cut([tensor.numel() * tensor.itemsize for tensor in tensors], self._slots.own_room)
        parts = next(pieces, None)
        slot, flat = (None, list(tensors)) if parts is None else await self._fill(tensors, parts)
        return Transfer(slot, partial(self._send_rest, flat, pieces))

    async def _send_rest(
        self, flat: list[Tensor], pieces: Iterator[list[ByteRange]], number: int, channel: Channel
    ) -> None:
        for parts in pieces:
            slot, _ = await self._fill(flat, parts)
            # In the message's own channel, so that it comes behind the announcement.
            await self._link.base.send(self._peer, entry_of({ENTRY: [number, slot]}, channel))

    async def _fill(self, tensors: Sequence[Tensor], parts: Sequence[ByteRange]) -> tuple[int, list[Tensor]]:
        """Copy a piece into a free slot; also returns the tensors for the next piece."""
        slot = await self._free.get()
        if slot is None:
            self._free.put_nowait(None)
            assert self._error is not None
            raise type(self._error)(*self._error.args)
        self._lent.add(slot)
        placed = _in_slot(parts, slot, self._slots.own_room)
        try:
            return slot, await self._copies.write(self._slots.own, tensors, placed, peer=self._peer)
        except BaseException:
            self._take_back(slot)
            raise

    def _take_back(self, slot: int) -> None:
        self._lent.discard(slot)
        self._free.put_nowait(slot)

    # Receiving.

    def receive(self, number: int, specs: Sequence[TensorSpec], fields: Plain) -> Awaitable[list[Tensor]]:
        """``fields`` is the first slot, None without bytes."""
        if number in self._filled:
            self.refuse(number, fields)
            self._check.fail(f"{ENTRY}.number", f"is {number}, which was announced before")
        filled: asyncio.Queue[int] = asyncio.Queue()
        if any(spec.num_bytes for spec in specs):
            filled.put_nowait(self._use(fields))
        elif fields is not None:
            self._check.fail(f"{ENTRY}.slot", f"is {fields!r:.80}, must be null where no tensor has bytes")
        self._filled[number] = filled
        task = background(self._receive(number, specs, filled))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _use(self, slot: Plain) -> int:
        """A checked slot of the peer's, which is read from now on."""
        most = self._slots.other.num_bytes // self._slots.other_room - 1
        number = whole(f"{ENTRY}.slot", slot, 0, most, error=partial(FrameError, self._peer))
        if number in self._reading:
            self._check.fail(f"{ENTRY}.slot", f"is {number}, which was not given back")
        self._reading.add(number)
        return number

    async def _receive(self, number: int, specs: Sequence[TensorSpec], filled: asyncio.Queue[int]) -> list[Tensor]:
        copies, memory, room = self._copies, self._slots.other, self._slots.other_room
        tensors: list[Tensor] | None = None
        try:
            for parts in cut([spec.num_bytes for spec in specs], room):
                slot = await filled.get()
                if self._is_closed:
                    raise TransportClosedError(CLOSED)
                try:
                    tensors = await copies.read(memory, specs, _in_slot(parts, slot, room), tensors, peer=self._peer)
                finally:
                    self._give_back(slot)
            return await copies.read(memory, specs, (), peer=self._peer) if tensors is None else tensors
        finally:
            del self._filled[number]

    def _give_back(self, slot: int) -> None:
        self._reading.discard(slot)
        if not self._is_closed:
            self._link.post({ENTRY: slot})

    def refuse(self, number: int, fields: Plain) -> None:
        with suppress(FrameError):
            self._give_back(self._use(fields))

    def on_entry(self, fields: Plain) -> None:
        if type(fields) is int:
            if fields not in self._lent:
                self._check.fail(f"{ENTRY}.slot", f"is {fields}, which was not lent")
            self._take_back(fields)
            return
        first, slot = self._check.array(ENTRY, fields, 2)
        number = self._check.integer(f"{ENTRY}.number", first)
        if number in self._filled:
            self._filled[number].put_nowait(self._use(slot))
        else:
            self.refuse(number, slot)
            self._check.fail(f"{ENTRY}.number", f"is {number}, which was not announced")

    # The end.

    async def close(self) -> None:
        while self._lent and await self._free.get() is not None:
            pass
        self._is_closed = True
        with suppress(Exception):  # of a device that has failed
            await self._copies.close_shared(self._slots.other, peer=self._peer)
            if not self._lent:
                await self._copies.close_shared(self._slots.own, peer=self._peer)

    def end_sending(self, error: RrfpError) -> None:
        if self._error is None:
            self._error = error
            self._free.put_nowait(None)

    def end(self, error: RrfpError) -> None:
        """The peer's memory closes with the copies, and this end's too unless the peer may still read it."""
        self.end_sending(error)
        if not (self._lent or self._is_closed):
            self._copies.close_at_end(self._slots.own, peer=self._peer)
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
