"""Messages between the ranks of one Linux host, over unix domain sockets.

Every two ranks share three connections, one for each channel, so control never waits behind tensors; the lower rank
connects to the higher one. Credit and heartbeats travel on control. This file joins the parts: `records` (the bytes on
a connection), `connection` (one socket), `peer` (the three connections to a rank) and `address`.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from functools import partial

from rrfp.errors import ConfigError, FrameError, PeerLostError, TransportClosedError, TransportError
from rrfp.transports import (
    BufferPool,
    Channel,
    Codec,
    HomeLoop,
    Inbox,
    Message,
    Sealed,
    Transport,
    TransportContext,
    TransportStatistics,
)
from rrfp_plugin_example.uds.address import connect, is_own_user, listen
from rrfp_plugin_example.uds.connection import Connection
from rrfp_plugin_example.uds.peer import Peer
from rrfp_plugin_example.uds.records import HELLO, WELCOME, Reading, RecordReader

_CLOSED = "the transport is closed"

#: Closing in order waits this long for peers that do not read, in seconds.
_CLOSE_S = 5.0

#: Before the next attempt to connect to a listener whose queue is full, in seconds.
_RETRY_S = 0.01

#: Bad records that wait to be raised; further ones are only counted, so that their sender cannot fill the memory.
_MAX_PENDING_ERRORS = 64


class UdsTransport(Transport):
    """Unix domain sockets between the ranks of one Linux host.

    Args:
        context: this rank, its peers and the limits.
    """

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        self._codec = Codec(context)
        self._pool = BufferPool()
        self._peers: dict[int, Peer] = {}
        self._listener: socket.socket | None = None
        self._unknown: set[Connection] = set()  # accepted, and not yet greeted
        self._home: HomeLoop | None = None
        self._inbox: Inbox | None = None
        self._closing: asyncio.Future[None] | None = None
        self._is_closed = False
        self._pending_errors = 0
        self._sent = self._sent_bytes = self._received = self._received_bytes = self._dropped = 0

    async def start(self) -> None:
        """See `Transport.start`."""
        if self._home is not None or self._is_closed:
            raise TransportClosedError("a transport starts once")
        context = self.context
        if not context.single_host:
            raise ConfigError("transport is 'uds', which joins the ranks of one host: use zmq")
        self._home = home = HomeLoop()
        self._inbox = Inbox(home)
        self._peers = {rank: Peer(rank, context, self._codec, home, self) for rank in context.peers}
        try:
            await self._connect(home, home.loop.time() + context.connect_timeout_s)
        except BaseException:
            self.abort()
            raise
        self._stop_listening()

    async def _connect(self, home: HomeLoop, deadline_s: float) -> None:
        context = self.context
        self._listener, address = listen(context.rank, len(context.peers))
        home.loop.add_reader(self._listener, self._accept)
        await context.rendezvous.publish(self._key(context.rank), address)
        for rank in context.peers:
            if rank > context.rank:
                try:
                    await self._connect_to(self._peers[rank], deadline_s)
                except TransportError as error:
                    self._check_open()
                    raise TransportError(f"rank {rank} did not connect: {error}") from error
        try:
            async with asyncio.timeout_at(deadline_s):
                for peer in self._peers.values():
                    await peer.opened.wait()
        except TimeoutError:
            missing = ", ".join(str(rank) for rank, peer in self._peers.items() if not peer.opened.is_set())
            limit_s = context.connect_timeout_s
            raise TransportError(f"no connection with rank {missing} within {limit_s:g} s") from None
        self._check_open()
        if lost := [str(rank) for rank, peer in self._peers.items() if peer.is_lost]:
            raise TransportError(f"rank {', '.join(lost)} connected, then left")

    def _key(self, rank: int) -> str:
        return f"uds/{self.context.run_id}/{self.context.restart}/{rank}"

    async def _connect_to(self, peer: Peer, deadline_s: float) -> None:
        loop = asyncio.get_running_loop()
        address = await self.context.rendezvous.lookup(self._key(peer.rank), max(0.0, deadline_s - loop.time()))
        for channel in Channel:
            while True:
                self._check_open()
                try:
                    connected = connect(address)
                    break
                except BlockingIOError:
                    if loop.time() > deadline_s:
                        raise TransportError("it does not accept connections") from None
                    await asyncio.sleep(_RETRY_S)
            reading = RecordReader(self._codec, self._pool).records(peer.rank, channel, peer)
            peer.attach(channel, Connection(connected, reading, peer.ender(channel)), HELLO, greeted=False)

    def _accept(self) -> None:
        assert self._listener is not None
        with suppress(BlockingIOError):
            accepted, _ = self._listener.accept()
            accepted.setblocking(False)
            if not is_own_user(accepted):
                accepted.close()
                return
            greeting = _Greeting(self, RecordReader(self._codec, self._pool))
            greeting.connection = Connection(accepted, greeting.reading(), greeting.on_end)
            self._unknown.add(greeting.connection)

    def admit(self, connection: Connection, sealed: Sealed) -> tuple[Peer, Channel]:
        """The peer and channel of a connection that greeted.

        Raises:
            FrameError: if the greeting is none, or not expected.
        """
        peer = self._peers[sealed.sender]
        channel = next((channel for channel in Channel if [channel.value] == sealed.fields), None)
        if sealed.kind != HELLO or channel is None:
            raise FrameError(peer.rank, "kind", f"is {sealed.kind!r:.80} on a new connection, must be: {HELLO}")
        if peer.rank > self.context.rank or peer.has(channel):
            raise FrameError(peer.rank, "channel", f"{channel} is connected already")
        self._unknown.discard(connection)
        peer.attach(channel, connection, WELCOME, greeted=True)
        return peer, channel

    def dismiss(self, connection: Connection) -> None:
        """Close a connection that is no peer's."""
        self._unknown.discard(connection)
        connection.close(TransportClosedError(_CLOSED))

    def _stop_listening(self) -> None:
        if self._listener is not None and self._home is not None:
            self._home.loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        for connection in tuple(self._unknown):
            self.dismiss(connection)

    def _check_open(self) -> Inbox:
        if self._inbox is None or self._closing is not None or self._is_closed:
            raise TransportClosedError("the transport is not started" if self._home is None else _CLOSED)
        return self._inbox

    async def send(self, peer: int, message: Message) -> None:
        """See `Transport.send`."""
        self._check_open()
        if peer not in self._peers:
            raise ConfigError(f"peer is {peer}, must be one of: {', '.join(map(str, self.context.peers))}")
        await self._peers[peer].send(message)
        self._sent += 1
        self._sent_bytes += message.num_bytes

    async def receive(self) -> Message:
        """See `Transport.receive`."""
        try:
            return await self._check_open().get()
        except FrameError:
            self._pending_errors -= 1
            raise

    async def close(self) -> None:
        """See `Transport.close`; waits `_CLOSE_S` at most for peers that do not read."""
        if self._inbox is None or self._home is None or self._is_closed:
            self.abort()
            return
        if self._closing is not None:
            await asyncio.shield(self._closing)
            return
        self._closing = self._home.loop.create_future()
        self._inbox.close()
        for peer in self._peers.values():
            peer.refuse_sends(TransportClosedError(_CLOSED))
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await asyncio.gather(*(peer.leave() for peer in self._peers.values() if peer.is_open))
        finally:
            self.abort()

    def abort(self) -> None:
        """See `Transport.abort`; the peers see connections that end without a farewell."""
        if self._is_closed:
            return
        self._is_closed = True
        self._stop_listening()
        if self._inbox is not None:
            self._inbox.close()
        for peer in self._peers.values():
            peer.end(TransportClosedError(_CLOSED))
        if self._closing is not None and not self._closing.done():
            self._closing.set_result(None)

    def statistics(self) -> TransportStatistics:
        """See `Transport.statistics`; bytes count as queued until the peer has received the message."""
        return TransportStatistics(
            messages_sent=self._sent,
            bytes_sent=self._sent_bytes,
            messages_received=self._received,
            bytes_received=self._received_bytes,
            queued_bytes=sum(peer.queued_bytes for peer in self._peers.values()),
            dropped_frames=self._dropped,
        )

    def on_message(self, message: Message) -> None:
        """See `Owner.on_message`."""
        assert self._inbox is not None
        self._inbox.put(message, partial(self._on_received, message), first=message.channel is Channel.CONTROL)

    def _on_received(self, message: Message) -> None:
        num_bytes = message.num_bytes
        self._received += 1
        self._received_bytes += num_bytes
        self._peers[message.sender].consumed(message.channel, num_bytes)

    def on_bad_record(self, error: FrameError) -> None:
        """See `Owner.on_bad_record`."""
        self._dropped += 1
        if self._pending_errors < _MAX_PENDING_ERRORS and self._inbox is not None:
            self._pending_errors += 1
            self._inbox.put(error, first=True)

    def on_lost(self, error: PeerLostError) -> None:
        """See `Owner.on_lost`."""
        if self._inbox is not None:
            self._inbox.put(error)


class _Greeting:
    """An accepted connection whose first record tells which peer's it is."""

    connection: Connection

    def __init__(self, transport: UdsTransport, reader: RecordReader) -> None:
        self._transport = transport
        self._reader = reader
        self._peer: Peer | None = None
        self._channel = Channel.CONTROL

    def reading(self) -> Reading:
        """The greeting, then the records of the peer."""
        try:
            sealed = yield from self._reader.header()
            self._peer, self._channel = self._transport.admit(self.connection, sealed)
        except FrameError as error:
            self._transport.on_bad_record(error)
            self._transport.dismiss(self.connection)
            yield memoryview(bytearray(1))  # never filled: the connection is closed
            return
        yield from self._reader.records(self._peer.rank, self._channel, self._peer)

    def on_end(self, reason: str) -> None:
        """The connection has ended."""
        if self._peer is None:
            self._transport.dismiss(self.connection)
        else:
            self._peer.ender(self._channel)(reason)
