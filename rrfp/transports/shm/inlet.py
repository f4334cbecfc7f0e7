"""The receiving side of one channel to one peer: datagrams become messages, whose large tensors stay in their slots."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Protocol

from rrfp.errors import FrameError, TransportError
from rrfp.transports.base import Channel, Message
from rrfp.transports.links.linked import BYE, CREDIT, HELLO, WANT, WELCOME
from rrfp.transports.shm.datagrams import BUFFER_BYTES, Datagram, DatagramBody, unpack
from rrfp.transports.shm.packets import Packet
from rrfp.transports.shm.slots import Slot, padded, with_limit
from rrfp.transports.shm.state import TransportState
from rrfp.transports.wire.announcements import Announcement
from rrfp.transports.wire.codec import Sealed
from rrfp.transports.wire.header_checks import HeaderChecks

DROP, LOST = "drop", "lost"

#: The kinds of the link's own frames; every other kind is a message's.
LINK_KINDS = (HELLO, WELCOME, CREDIT, WANT, DROP, LOST, BYE)


class DatagramReceiver(Protocol):
    """The link of an inlet."""

    peer: int

    def on_frame(self, channel: Channel, sealed: Sealed) -> None:
        """A frame of the link itself arrived."""

    def on_message_lost(self, channel: Channel, num_bytes: int, slot: int) -> None:
        """The slot of a good message cannot be mapped here."""


class ShmInlet:
    """One channel of a peer. Used on one loop only."""

    def __init__(self, channel: Channel, shared: TransportState, link: DatagramReceiver) -> None:
        self._peer = link.peer
        self._channel = channel
        self._codec = shared.codec
        self._register = shared.register
        self._link = link
        self._owner = shared.owner
        self._slots: dict[int, Slot] = {}
        self._sequence = 0

    def accept(self, packet: Packet, buffer: memoryview) -> None:
        """Handle a datagram that lies in ``buffer``."""
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
            return announcement.assemble(_cut(datagram.inline, sizes), copy=True)
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


def _cut(inline: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    views, start = [], 0
    for size in sizes:
        views.append(inline[start : start + size])
        start += size
    return views
