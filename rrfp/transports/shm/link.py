"""The connection to one peer, and its three channels: tensors go into a datagram or into a slot, and are copied once.

Connecting (three sockets, each greeted) -> open -> left in order (bye on every channel) or lost. Everything that a
process sent before its end lies in this rank's sockets already, also its bye or the abort that names a cause. So when
one socket ends, all are read to their end, and then the rank knows whether the peer left or died.

Of each channel an outlet sends, and an inlet makes messages of datagrams, whose large tensors stay in their slots.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

from rrfp.errors import FrameError, PeerLostError, RrfpError, TransportError
from rrfp.transports.base import Channel, Message
from rrfp.transports.links.flow import Window, cost_of
from rrfp.transports.links.linked import BYE, CREDIT, HELLO, LEFT, WANT, WELCOME, GreetedLink
from rrfp.transports.shm.packets import (
    BUFFER_BYTES,
    INLINE_BYTES,
    Datagram,
    DatagramBody,
    Packet,
    PacketSocket,
    pack,
    unpack,
)
from rrfp.transports.shm.slot_pool import SlotLoan, SlotPool, is_same
from rrfp.transports.shm.slots import Slot, padded, with_limit
from rrfp.transports.shm.state import TransportState
from rrfp.transports.wire.announcements import Announcement
from rrfp.transports.wire.codec import Sealed
from rrfp.transports.wire.header_checks import HeaderChecks
from rrfp.transports.wire.tensor_bytes import copy_bytes

DROP, LOST = "drop", "lost"

#: The kinds of the link's own frames; every other kind is a message's.
LINK_KINDS = (HELLO, WELCOME, CREDIT, WANT, DROP, LOST, BYE)

#: Larger messages are copied in the helper thread. Up to here a copy keeps the loop busy for less than half a
#: millisecond, without the GIL; a thread costs as much processor time in switches alone.
COPIED_ON_LOOP_BYTES = 2 << 20


class ShmOutlet:
    """The sending side of one channel. Used on one loop only."""

    def __init__(self, peer: int, packets: PacketSocket, shared: TransportState, ask: Callable[[], None]) -> None:
        home = shared.home
        self.window = Window(shared.queue_bytes, home, ask)
        self.pool = SlotPool(home.loop.time, self._on_dropped, shared.register, shared.make_room)
        self._peer = peer
        self._packets = packets
        self._codec = shared.codec
        self._copier = shared.copier
        self._turn = asyncio.Lock()
        self._sequence = 0
        self._error: RrfpError | None = None
        self._loan: SlotLoan | None = None

    async def send(self, message: Message, num_bytes: int) -> None:
        """See `OutletContract.send`. Cancelled, it has sent nothing."""
        cost = cost_of(num_bytes)
        self._codec.check_size(num_bytes)
        async with self._turn:
            await self.window.acquire(cost)
            try:
                header, frames = self._codec.encode(message, self._sequence)
                if num_bytes <= INLINE_BYTES:
                    await self._send(pack(header, DatagramBody(len(frames), num_bytes), frames))
                else:
                    await self._send_in_slot(header, frames, num_bytes)
            except BaseException:
                self.window.release(cost)
                raise
            self._sequence += 1

    def send_at_once(self, message: Message, num_bytes: int) -> bool:
        """Send a message if nothing has to be waited for; see `SendsAtOnce`."""
        cost = cost_of(num_bytes)
        if self._turn.locked() or num_bytes > COPIED_ON_LOOP_BYTES:
            return False
        self._codec.check_size(num_bytes)
        if not self.window.try_acquire(cost):
            return False
        sent = False
        try:
            sent = self._push(message, num_bytes)
        except OSError:
            return False  # the peer is gone, or there is no memory: `send` says so
        finally:
            if not sent:
                self.window.release(cost)
        self._sequence += 1
        return True

    def _push(self, message: Message, num_bytes: int) -> bool:
        header, frames = self._codec.encode(message, self._sequence)
        if num_bytes <= INLINE_BYTES:
            return self._packets.push(pack(header, DatagramBody(len(frames), num_bytes), frames))
        slot = self._slot_for(frames)
        sent = False
        try:
            _fill(slot, _copies_into(slot, frames))
            payload = DatagramBody(len(frames), num_bytes, slot.ident, slot.num_bytes)
            sent = self._packets.push(pack(header, payload), slot.descriptor)
        finally:
            if not sent:
                self._put_back(slot)
        slot.close_descriptor()
        return sent

    async def _send_in_slot(self, header: bytes, frames: list[memoryview], num_bytes: int) -> None:
        slot = self._slot_for(frames)
        copies = _copies_into(slot, frames)
        is_short = sum(frame.nbytes for _, frame in copies) <= COPIED_ON_LOOP_BYTES
        filled = self._copier.run(partial(_fill, slot, copies), now=is_short)
        try:
            await asyncio.shield(filled)
            payload = DatagramBody(len(frames), num_bytes, slot.ident, slot.num_bytes)
            await self._send(pack(header, payload), slot.descriptor)
        except BaseException as error:
            # A slot in the middle of a copy must not be lent to another message.
            filled.add_done_callback(partial(self._on_unsent, slot))
            if isinstance(error, OSError):
                raise self._no_memory(slot.num_bytes, error) from error
            raise
        slot.close_descriptor()

    def lend(self, sizes: Sequence[int]) -> SlotLoan | None:
        """A slot for the next message; None if that would have no slot."""
        if sum(sizes) <= INLINE_BYTES:
            return None
        self._loan = SlotLoan(self._acquire(sum(map(padded, sizes))), sizes, self.pool)
        return self._loan

    def _slot_for(self, frames: Sequence[memoryview]) -> Slot:
        if self._loan is not None and self._loan.accept(frames):
            slot, self._loan = self._loan.slot, None
            return slot
        return self._acquire(sum(padded(frame.nbytes) for frame in frames))

    def _acquire(self, num_bytes: int) -> Slot:
        try:
            return self.pool.acquire(num_bytes)
        except OSError as error:
            raise self._no_memory(num_bytes, error) from error

    def _on_unsent(self, slot: Slot, filled: asyncio.Future[None]) -> None:
        """The copy into ``slot`` has ended, which the receiver did not get."""
        if not filled.cancelled():
            filled.exception()  # else the loop reports it as never retrieved
        self._put_back(slot)

    def _put_back(self, slot: Slot) -> None:
        """The receiver did not get ``slot``, and nothing is copied into it."""
        if slot.descriptor is None:
            slot.free()
        else:
            self.pool.forget(slot)

    def _on_dropped(self, ident: int) -> None:
        self._packets.post(pack(self._codec.seal(DROP, ident)))

    async def _send(self, parts: Sequence[bytes | memoryview], descriptor: int | None = None) -> None:
        try:
            await self._packets.send(parts, descriptor)
        except OSError:  # this end is closed, for the reason passed to `fail`, or the peer's is
            error = self._error or PeerLostError(self._peer, "its connection ended")
            self.window.fail(error)
            raise type(error)(*error.args) from None

    def _no_memory(self, num_bytes: int, error: OSError) -> TransportError:
        return TransportError(
            f"no {num_bytes} bytes of shared memory for a message to rank {self._peer}: {with_limit(error)}"
        )

    async def post_in_turn(self, header: bytes) -> None:
        async with self._turn:
            await self._send(pack(header))

    def fail(self, error: RrfpError) -> None:
        """Free everything at once; waiting and later sends raise ``error``, the first one passed."""
        self.window.fail(error)
        self._error = self._error or error
        self.pool.clear()


def _copies_into(slot: Slot, frames: Sequence[memoryview]) -> list[tuple[memoryview, memoryview]]:
    """Targets in ``slot`` and sources, but for frames that lie there already."""
    targets = slot.frames([frame.nbytes for frame in frames])
    return [pair for pair in zip(targets, frames, strict=True) if not is_same(*pair)]


def _fill(slot: Slot, copies: Sequence[tuple[memoryview, memoryview]]) -> None:
    if slot.descriptor is not None:
        slot.reserve()
    for target, frame in copies:
        copy_bytes(target, frame)


class ShmInlet:
    """One channel of a peer. Used on one loop only."""

    def __init__(self, channel: Channel, shared: TransportState, link: ShmLink) -> None:
        self._peer = link.peer
        self._channel = channel
        self._codec = shared.codec
        self._register = shared.register
        self._link = link
        self._owner = shared.owner
        self._slots: dict[int, Slot] = {}
        self._sequence = 0

    def accept(self, packet: Packet, buffer: memoryview) -> None:
        slot = None
        try:
            if packet.is_cut:
                raise FrameError(
                    self._peer, "header", f"or tensors in the datagram have more than {BUFFER_BYTES} bytes"
                )
            datagram = unpack(self._peer, buffer[: packet.size])
            slot = self._slot_of(datagram, packet)
            sealed = self._codec.open(datagram.header, self._peer)
            if sealed.kind == DROP:
                self._drop(sealed.fields)
            elif sealed.kind in LINK_KINDS:
                self._link.on_frame(self._channel, sealed)
            else:
                message = self._message(sealed, datagram, slot)
                self._sequence += 1
                self._owner.on_message(message, datagram.payload.num_bytes)
        except TransportError as error:
            if slot is not None and not slot.is_borrowed:
                slot.free()
            self._owner.on_bad_frame(error)
        finally:
            if packet.descriptor is not None:
                os.close(packet.descriptor)  # the mapping needs it no longer

    def _message(self, sealed: Sealed, datagram: Datagram, slot: Slot | None) -> Message:
        announcement = self._next(sealed, datagram)
        sizes = announcement.sizes
        if slot is None:
            ends = zip(sizes, accumulate(sizes), strict=True)
            return announcement.assemble([datagram.inline[end - size : end] for size, end in ends], copy=True)
        if (needed := sum(map(padded, sizes))) > slot.num_bytes:
            raise FrameError(self._peer, "frames", f"need {needed} bytes, but the slot has {slot.num_bytes}")
        if slot.is_borrowed:
            raise FrameError(self._peer, "slot", f"is {slot.ident}, which an earlier message still uses")
        return announcement.assemble(slot.borrow(sizes))

    def _next(self, sealed: Sealed, datagram: Datagram) -> Announcement:
        """The checked header of the channel's next message."""
        announcement = self._codec.announcement(sealed)
        channel, sequence, sizes = announcement.channel, announcement.sequence, announcement.sizes
        if channel is not self._channel:
            raise FrameError(self._peer, "channel", f"is {channel}, but the connection is for {self._channel}")
        if sequence != self._sequence:
            raise FrameError(self._peer, "sequence", f"is {sequence}, must be {self._sequence}")
        count, num_bytes, *_ = datagram.payload
        if (count, num_bytes) != (len(sizes), announcement.num_bytes):
            reason = f"{count} frames with {num_bytes} bytes are there, not the announced ones with {sizes!r:.80}"
            raise FrameError(self._peer, "frames", reason)
        return announcement

    def _slot_of(self, datagram: Datagram, packet: Packet) -> Slot | None:
        """The slot that a datagram names; mapped if its descriptor came along."""
        payload = datagram.payload
        try:
            if packet.lacks_descriptor:
                raise OSError("this process may open no more files (RLIMIT_NOFILE, ulimit -n)")
            if packet.descriptor is not None and payload.slot:
                self._slots[payload.slot] = self._open(payload, packet.descriptor)
        except OSError as error:
            self._lose(datagram)
            raise TransportError(f"a message of rank {self._peer} was lost: {with_limit(error)}") from error
        if payload.slot == 0:
            return None
        slot = self._slots.get(payload.slot)
        if slot is None or slot.num_bytes != payload.room:
            raise FrameError(self._peer, "slot", f"is {payload.slot} with {payload.room} bytes, which is unknown here")
        return slot

    def _open(self, payload: DatagramBody, descriptor: int) -> Slot:
        try:
            slot = Slot.open(payload.slot, payload.room, descriptor)
        except ValueError as error:
            raise FrameError(self._peer, "slot", str(error)) from error
        slot.registration = self._register(slot.memory)
        return slot

    def _lose(self, datagram: Datagram) -> None:
        """Have the channel continue behind a good message whose slot is none here."""
        announcement = self._next(self._codec.open(datagram.header, self._peer), datagram)
        self._sequence += 1
        self._link.on_message_lost(self._channel, announcement.num_bytes, datagram.payload.slot)

    def _drop(self, fields: list[Any]) -> None:
        """Forget a slot; memory that tensors still use stays theirs."""
        check = HeaderChecks(self._peer)
        (ident,) = check.array("drop", fields, 1)
        self._slots.pop(check.integer("drop.slot", ident, least=1), None)

    def close(self) -> None:
        """Forget all slots. Received tensors stay valid."""
        self._slots.clear()


#: Datagrams that are read of one channel before the loop runs.
_BATCH = 32


@dataclass(slots=True)
class _Connection:
    """One channel: its socket, and what arrives."""

    packets: PacketSocket
    inlet: ShmInlet
    has_ended: bool = False


class ShmLink(GreetedLink[ShmOutlet]):
    """The connection to one peer. Used on one loop only."""

    def __init__(self, peer: int, shared: TransportState) -> None:
        super().__init__(peer, shared.queue_bytes)
        self.process: int | None = None
        self._shared = shared
        self._connections: dict[Channel, _Connection] = {}
        self._welcomed: set[Channel] = set()

    def attach(self, channel: Channel, packets: PacketSocket, process: int, *, accepted: bool) -> None:
        """Add the socket of a channel, and greet."""
        if self._is_over:  # the peer ended between two of its sockets
            packets.close()
            return
        shared = self._shared
        self.process = process
        outlet = ShmOutlet(self.peer, packets, shared, partial(self._post, WANT, channel.value))
        self.outlets = {**self.outlets, channel: outlet}  # a new one: `statistics` may be reading it in another thread
        connection = _Connection(packets, ShmInlet(channel, shared, self))
        self._connections[channel] = connection
        packets.on_readable(partial(self._read, connection, _BATCH))
        if accepted:
            self._post_on(channel, WELCOME)
            self._on_welcome(channel)
        else:
            self._post_on(channel, HELLO, channel.value)

    def has(self, channel: Channel) -> bool:
        return channel in self._connections

    def _on_welcome(self, channel: Channel) -> None:
        self._welcomed.add(channel)
        if len(self._welcomed) == len(Channel):
            self.is_connected = True
            self.opened.set()

    def _post(self, kind: str, *fields: object) -> None:
        self._post_on(Channel.CONTROL, kind, *fields)

    def _post_on(self, channel: Channel, kind: str, *fields: object) -> None:
        self._connections[channel].packets.post(pack(self._shared.codec.seal(kind, *fields)))

    def _read(self, connection: _Connection, most: int | None = None) -> None:
        buffer = self._shared.buffer
        view = memoryview(buffer)
        while not (self._is_over or connection.has_ended or most == 0):
            packet = connection.packets.read(buffer)
            if packet is None:
                return
            if packet.size == 0:
                connection.has_ended = True
                if most is not None:  # else `lose` reads what is left
                    self.lose("its connection ended")
                return
            connection.inlet.accept(packet, view)
            most = None if most is None else most - 1

    def on_frame(self, channel: Channel, sealed: Sealed) -> None:
        if sealed.kind == WELCOME:
            self._on_welcome(channel)
        elif sealed.kind == LOST:
            check = HeaderChecks(self.peer)
            (slot,) = check.array("lost", sealed.fields, 1)
            self.outlets[channel].pool.take_back(check.integer("lost.slot", slot, least=1))
        else:
            super().on_frame(channel, sealed)

    def on_message_lost(self, channel: Channel, num_bytes: int, slot: int) -> None:
        """A message cannot be received here: its bytes become credit."""
        self.consumed(channel, num_bytes)
        if slot:
            self._post_on(channel, LOST, slot)

    def lose(self, reason: str) -> None:
        """Read what the peer sent, then report its loss, unless it left."""
        for connection in self._connections.values():
            self._read(connection)
        if self._is_over:
            return
        if self._has_left:
            self.end(PeerLostError(self.peer, LEFT))
            return
        error = PeerLostError(self.peer, reason)
        self.end(error)
        self._shared.owner.on_error(error)

    def end(self, error: RrfpError) -> None:
        """Free all resources; sends raise the first ``error`` passed. May be called twice."""
        self._is_over = True
        self.opened.set()
        self._credits.close()
        for outlet in self.outlets.values():
            outlet.fail(error)
        for connection in self._connections.values():
            connection.packets.close()
            connection.inlet.close()

    async def leave(self) -> None:
        with suppress(RrfpError):
            for outlet in self.outlets.values():
                await outlet.post_in_turn(self._shared.codec.seal(BYE))
