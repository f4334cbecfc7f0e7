"""The part of a transport that its kind of connection does not matter to: for each peer a link, for all one inbox.

`zmq` and `shm` derive from it. A link is the state of the connection to one peer; it reports messages, bad frames and
the peer's loss to its transport, or to the one that this is a part of.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from rrfp import timeouts
from rrfp.errors import ConfigError, FrameError, PeerLostError, RrfpError, TransportClosedError, TransportError
from rrfp.log import RateLimitedLog, get_logger
from rrfp.transports.base import Channel, Deliver, Message, Transport, TransportContext, TransportStatistics
from rrfp.transports.links.flow import CLOSED, Credits, HomeLoop, Inbox, Window, grant
from rrfp.transports.rendezvous import lookup_peer
from rrfp.transports.wire.codec import Codec, Sealed

_log = get_logger(__name__)

#: Bad frames that wait to be raised; further ones are only counted, so that a sender of them cannot fill the memory.
MAX_PENDING_FRAME_ERRORS = 64


class OutletContract(Protocol):
    """The sending side of one channel to one peer."""

    window: Window

    async def send(self, message: Message, num_bytes: int) -> None:
        """Send a whole message, whose tensors have ``num_bytes``; see `Transport.send`."""

    def send_at_once(self, message: Message, num_bytes: int) -> bool:
        """See `rrfp.transports.base.SendsAtOnce`; may raise what `send` raises, and has sent nothing then."""


class LinkContract(Protocol):
    """The connection to one peer."""

    #: Set when messages can flow both ways, or never will.
    opened: asyncio.Event
    #: They can, or could.
    is_connected: bool

    @property
    def outlets(self) -> Mapping[Channel, OutletContract]:
        """Those of the channels that are connected."""

    def consumed(self, channel: Channel, num_bytes: int) -> None:
        """``receive`` returned a message of ``channel`` with so many bytes of tensors."""

    async def leave(self) -> None:
        """Deliver the accepted messages and leave; returns at once if the peer is gone."""

    def end(self, error: RrfpError) -> None:
        """Free all resources; sends raise the first ``error`` passed. May be called twice."""


#: Kinds of frames that links over connections of their own exchange.
HELLO, WELCOME, CREDIT, WANT, BYE = "hello", "welcome", "credit", "want", "bye"

LEFT = "it closed its end"

Outlet = TypeVar("Outlet", bound=OutletContract)


class GreetedLink(ABC, Generic[Outlet]):
    """A link over connections of its own, one for each channel: the frames that it exchanges with the peer's end."""

    def __init__(self, peer: int, queue_bytes: int) -> None:
        self.peer = peer
        self.outlets: dict[Channel, Outlet] = {}
        self.is_connected = False
        self.opened = asyncio.Event()
        self._byes: set[Channel] = set()
        self._is_over = False
        self._credits = Credits(queue_bytes, partial(self._post, CREDIT))

    @abstractmethod
    def _post(self, kind: str, *fields: object) -> None:
        """Send a frame on control, without waiting."""

    @property
    def _has_left(self) -> bool:
        return len(self._byes) == len(Channel)

    def on_frame(self, channel: Channel, sealed: Sealed) -> None:
        """Handle a frame of the link itself; a FrameError if a field is malformed."""
        if sealed.kind == CREDIT:
            grant(sealed.sender, CREDIT, sealed.fields, self._window)
        elif sealed.kind == WANT:
            self._credits.want(sealed.sender, WANT, sealed.fields)
        elif sealed.kind == BYE:
            self._byes.add(channel)
            if self._has_left:
                self._on_left()

    def _window(self, channel: Channel) -> Window:
        outlet = self.outlets.get(channel)
        if outlet is None:
            raise FrameError(self.peer, "credit", "comes before the greeting")
        return outlet.window

    def _on_left(self) -> None:
        for outlet in self.outlets.values():
            outlet.window.fail(PeerLostError(self.peer, LEFT))

    def consumed(self, channel: Channel, num_bytes: int) -> None:
        self._credits.consumed(channel, num_bytes)


Link = TypeVar("Link", bound=LinkContract)


class LinkedTransport(Transport, Generic[Link]):
    """A link for each peer, and one inbox. A subclass has `_connect` and `_free`.

    As a part of ``whole`` it connects some of its peers; messages, bad frames and losses go there.
    """

    def __init__(self, context: TransportContext, whole: LinkedTransport[Any] | None = None) -> None:
        super().__init__(context)
        self._whole: LinkedTransport[Any] = whole or self
        self._codec = Codec(context)
        self._links: dict[int, Link] = {}
        self._inbox: Inbox | None = None
        self._deliver: Deliver | None = None
        self._started = False
        self._closing = False
        self._closed: asyncio.Event | None = None
        self._is_closed = False
        self._pending_errors = 0
        self._rejections = RateLimitedLog(_log)
        self._sent = self._sent_bytes = self._received = self._received_bytes = self._dropped = 0

    @abstractmethod
    async def _connect(self, home: HomeLoop, deadline_s: float) -> None:
        """Make `_links`, one for each peer, and connect them; returns before they have opened."""

    @abstractmethod
    def _free(self) -> None:
        """Free everything but the links, which have ended. Called once, also without `_connect`."""

    async def start(self) -> None:
        """Publish the endpoint and connect to every peer; see `Transport.start`."""
        if self._started or self._is_closed:
            raise TransportClosedError("a transport starts once")
        self._started = True
        self._closed = asyncio.Event()
        home = HomeLoop()
        self._inbox = Inbox(home)
        deadline_s = home.loop.time() + self.context.connect_timeout_s
        try:
            await self._connect(home, deadline_s)
            await self._wait_for_peers(deadline_s - home.loop.time())
        except BaseException:
            self.abort()
            raise

    async def _endpoint_of(self, peer: int, key: str, deadline_s: float) -> bytes:
        endpoint = await lookup_peer(self.context, peer, key, deadline_s)
        self._check_open()
        return endpoint

    async def _wait_for_peers(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(max(timeout_s, 0.0)):
                for link in self._links.values():
                    await link.opened.wait()
        except TimeoutError:
            missing = [str(peer) for peer, link in self._links.items() if not link.opened.is_set()]
            limit_s = self.context.connect_timeout_s
            raise TransportError(f"no connection with rank {', '.join(missing)} within {limit_s:g} s") from None
        self._check_open()
        # A peer that connected and closed its end is no error here: `receive` and `send` report it.
        if lost := [str(peer) for peer, link in self._links.items() if not link.is_connected]:
            raise TransportError(f"rank {', '.join(lost)} connected, then left")

    def _check_open(self) -> Inbox:
        if self._inbox is None or self._closing or self._is_closed:
            raise TransportClosedError(CLOSED if self._started else "the transport is not started")
        return self._inbox

    async def send(self, peer: int, message: Message) -> None:
        self._check_open()
        link = self._links.get(peer)
        outlet = None if link is None else link.outlets.get(message.channel)
        if outlet is None:
            raise ConfigError(f"peer is {peer}, must be one of: {', '.join(map(str, self.context.peers))}")
        num_bytes = message.num_bytes
        await outlet.send(message, num_bytes)
        self._count(num_bytes)

    def send_at_once(self, peer: int, message: Message) -> bool:
        link = self._links.get(peer)
        outlet = None if link is None or self._closing else link.outlets.get(message.channel)
        num_bytes = message.num_bytes
        try:
            if outlet is None or not outlet.send_at_once(message, num_bytes):
                return False
        except RrfpError:
            return False  # `send` raises it
        self._count(num_bytes)
        return True

    def _count(self, num_bytes: int) -> None:
        self._sent += 1
        self._sent_bytes += num_bytes

    async def receive(self) -> Message:
        return await self._check_open().get()

    def deliver_to(self, deliver: Deliver) -> None:
        self._check_open().deliver_to(deliver)
        self._deliver = deliver

    async def close(self) -> None:
        """See `Transport.close`; waits `TRANSPORT_CLOSE_S` at most for the peers."""
        if self._is_closed or self._inbox is None or self._closed is None:
            self.abort()
            return
        if self._closing:
            await self._closed.wait()
            return
        self._closing = True
        self._inbox.close()
        for outlet in self._outlets():
            outlet.window.fail(TransportClosedError(CLOSED))
        try:
            # A peer that does not answer in time is silent, or has its bye and not the time to answer: in both cases
            # waiting longer delivers nothing more.
            with suppress(TimeoutError):
                leaves = asyncio.gather(*(link.leave() for link in self._links.values()))
                await asyncio.wait_for(leaves, timeouts.TRANSPORT_CLOSE_S)
        finally:
            self.abort()

    def abort(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._inbox is not None:
            self._inbox.close()
        for link in self._links.values():
            link.end(TransportClosedError(CLOSED))
        self._free()
        if self._closed is not None:
            self._closed.set()

    def _outlets(self) -> list[OutletContract]:
        return [outlet for link in self._links.values() for outlet in link.outlets.values()]

    def statistics(self) -> TransportStatistics:
        """See `Transport.statistics`; bytes count as queued until the peer has received the message."""
        return TransportStatistics(
            messages_sent=self._sent,
            bytes_sent=self._sent_bytes,
            messages_received=self._received,
            bytes_received=self._received_bytes,
            queued_bytes=sum(outlet.window.tensor_bytes for outlet in self._outlets()),
            dropped_frames=self._dropped,
            strangers=self._rejections.count,
        )

    def on_message(self, message: Message, num_bytes: int) -> None:
        assert self._inbox is not None
        if self._deliver is None:
            on_received = partial(self._on_received, message, num_bytes)
            self._inbox.put(message, on_received, first=message.channel is Channel.CONTROL)
        elif not (self._closing or self._is_closed):  # on the loop already, and behind nothing: as the inbox would
            self._on_received(message, num_bytes)
            self._deliver(message)

    def _on_received(self, message: Message, num_bytes: int) -> None:
        self._received += 1
        self._received_bytes += num_bytes
        self._links[message.sender].consumed(message.channel, num_bytes)

    def on_bad_frame(self, error: TransportError) -> None:
        self._dropped += 1
        if self._pending_errors < MAX_PENDING_FRAME_ERRORS and self._inbox is not None:
            self._pending_errors += 1
            self._inbox.put(error, self._on_error_raised, first=True)

    def on_rejected(self, sentence: str) -> None:
        self._rejections.add(sentence)

    def _on_error_raised(self) -> None:
        self._pending_errors -= 1

    def on_error(self, error: RrfpError) -> None:
        """A peer is lost, and its last message was reported, or this end failed: ``receive`` raises it."""
        assert self._inbox is not None
        self._inbox.put(error)
