"""Accepted connections before their greeting, whose peers are not known yet."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from rrfp.errors import FrameError, RrfpError, TransportError
from rrfp.transports.base import Channel
from rrfp.transports.flow import HomeLoop
from rrfp.transports.header_checks import HeaderChecks, shown
from rrfp.transports.shm.datagrams import unpack
from rrfp.transports.shm.endpoint import Connected
from rrfp.transports.shm.inlet import HELLO
from rrfp.transports.shm.packets import PacketSocket
from rrfp.transports.wire import Codec

#: Takes a greeted connection: rank, channel, socket and process. Raises a FrameError if that channel has one already.
OnGreeted = Callable[[int, Channel, PacketSocket, int], None]


class Strangers:
    """Reads the greeting of each accepted connection; closes one that greets wrongly, and reports it.

    Args:
        codec: of the rank.
        home: the loop.
        buffer: for datagrams.
        on_greeted: takes the connections of peers.
        on_stranger: takes a sentence for each other one.
    """

    def __init__(
        self,
        codec: Codec,
        home: HomeLoop,
        buffer: bytearray,
        on_greeted: OnGreeted,
        on_stranger: Callable[[str], None],
    ) -> None:
        self._codec = codec
        self._home = home
        self._buffer = buffer
        self._on_greeted = on_greeted
        self._on_stranger = on_stranger
        self._waiting: dict[PacketSocket, int] = {}

    def add(self, connected: Connected) -> None:
        """Wait for the greeting of an accepted connection."""
        packets = PacketSocket(connected.sock, self._home)
        self._waiting[packets] = connected.process
        packets.on_readable(partial(self._read, packets))

    def _read(self, packets: PacketSocket) -> None:
        packet = packets.read(self._buffer)
        if packet is None:
            return
        process = self._waiting.pop(packets)
        try:
            if packet.descriptor is not None:
                os.close(packet.descriptor)
            if packet.size == 0:
                raise TransportError("it ended before its greeting")
            sealed = self._codec.open(unpack(None, memoryview(self._buffer)[: packet.size]).header)
            if sealed.kind != HELLO:
                raise FrameError(sealed.sender, "kind", f"is {shown(sealed.kind)}, must be {HELLO!r}")
            check = HeaderChecks(sealed.sender)
            (name,) = check.array("hello", sealed.fields, 1)
            self._on_greeted(sealed.sender, check.choice("hello.channel", name, Channel), packets, process)
        except RrfpError as error:
            packets.close()
            self._on_stranger(f"a connection from process {process} was refused: {error}")

    def close(self) -> None:
        """Close all that have not greeted. May be called twice."""
        for packets in self._waiting:
            packets.close()
        self._waiting.clear()
