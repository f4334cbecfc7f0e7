"""All that one peer needs: windows and turns to send, edges both ways, and how its end is noticed and reported.

Two observers see a peer's end. The carrier reports it once, after the peer's last message and with the reason. An edge
only fails. So a failed edge is no loss before the carrier had `FAREWELL_TIMEOUT_S` to report one, or the peer's
farewell; and a loss that the carrier reports waits `LAST_MESSAGES_S` for the transfers that still move.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Protocol

from rrfp import timeouts
from rrfp.errors import FrameError, PeerLostError, RrfpError, TransportError
from rrfp.transports.base import Channel, Message, MessageKind, Plain, Transport, TransportContext, sending_at_once
from rrfp.transports.carried.announcements import CREDIT, FAREWELL, WANT
from rrfp.transports.carried.arrivals import AnnouncedReceives
from rrfp.transports.carried.outlet import Sender, TunnelOutlet
from rrfp.transports.carried.wires import Backend, Edge
from rrfp.transports.flow import Credits, HomeLoop, Window, grant

LEFT = "it closed its end"


class TunnelOwner(Protocol):
    """The transport, to which links report."""

    context: TransportContext

    def on_message(self, message: Message, num_bytes: int) -> None:
        """A whole message arrived."""

    def on_bad_frame(self, error: TransportError) -> None:
        """An announcement was dropped."""

    def on_lost(self, error: PeerLostError) -> None:
        """The peer is lost, and its last message was reported."""

    def on_failure(self, error: RrfpError) -> None:
        """An error of this end: ``receive`` raises it."""

    async def close_carrier(self) -> None:
        """One link has left; returns when all have, and the carrier is closed."""


class TunnelLink:
    """The connection to one peer; see `rrfp.transports.linked.LinkFactory`.

    Args:
        peer: its rank.
        owner: the transport.
        carrier: moves announcements, and messages without tensors.
        backend: allocates memory to receive into; None where there are no edges.
        outgoing: the edge to the peer; None where the two exchange tensors over the carrier.
        incoming: the edge from it.
        home: the loop.
    """

    def __init__(
        self,
        peer: int,
        owner: TunnelOwner,
        carrier: Transport,
        backend: Backend | None,
        outgoing: Edge | None,
        incoming: Edge | None,
        home: HomeLoop,
    ) -> None:
        context = owner.context
        self.is_connected = True
        self.opened = asyncio.Event()
        self.opened.set()
        self._peer = peer
        self._owner = owner
        self._carrier = carrier
        self._at_once = sending_at_once(carrier)
        self._edges = [edge for edge in (outgoing, incoming) if edge is not None]
        self._home = home
        self._sender = self._new_sender(outgoing, backend)
        self._outlets = {
            channel: TunnelOutlet(self._sender, Window(context.queue_bytes, home, partial(self._ask, channel)))
            for channel in Channel
        }
        self._arrivals = self._new_arrivals(incoming, backend)
        self._credits = Credits(context.queue_bytes, self._send_credit)
        #: Counts the whole messages of each channel.
        self._sequences = dict.fromkeys(Channel, 0)
        self._sending: set[asyncio.Task[None]] = set()
        #: Why sends fail, and an event for those that only know that their transfer failed.
        self._error: RrfpError | None = None
        self._failed = asyncio.Event()
        #: The loss to be reported, once transfers have ended or their time is up.
        self._loss: PeerLostError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._reported = False
        #: The peer's farewell has come, and the error of the first transfer from it that failed.
        self._has_left = False
        self._missed: Exception | None = None

    def _new_sender(self, edge: Edge | None, backend: Backend | None) -> Sender:
        limit = self._owner.context.max_message_bytes
        return Sender(self._peer, self._carrier, edge, backend, limit, self._reason)

    def _new_arrivals(self, edge: Edge | None, backend: Backend | None) -> AnnouncedReceives:
        return AnnouncedReceives(
            edge, backend, self._owner.context.max_message_bytes, self._on_whole, self._on_arrival_failed
        )

    @property
    def outlets(self) -> Mapping[Channel, TunnelOutlet]:
        """One for each channel."""
        return self._outlets

    def consumed(self, channel: Channel, num_bytes: int) -> None:
        """See `LinkOf.consumed`."""
        self._credits.consumed(channel, num_bytes)

    def on_message(self, message: Message) -> None:
        """The carrier brought a message, an announcement or an entry of the links' own."""
        try:
            if FAREWELL in message.body:
                self._on_farewell()
            elif CREDIT in message.body:
                grant(message.sender, CREDIT, message.body[CREDIT], lambda channel: self._outlets[channel].window)
            elif WANT in message.body:
                self._credits.want(message.sender, WANT, message.body[WANT])
            elif not self._reported:
                self._arrivals.add(message)
        except FrameError as error:
            self._owner.on_bad_frame(error)

    def _on_whole(self, message: Message, num_bytes: int) -> None:
        if self._reported:
            return
        channel = message.channel
        number, self._sequences[channel] = self._sequences[channel], self._sequences[channel] + 1
        self._owner.on_message(replace(message, sequence=number), num_bytes)

    # The peer's end.

    def on_lost(self, error: PeerLostError) -> None:
        """The carrier lost the peer; all that it brought was passed to `on_message`."""
        if self._loss is not None or self._reported:
            return
        self._loss = error
        self._fail(error)
        self._wait_for_transfers()

    def _wait_for_transfers(self) -> None:
        self._stop_timer()
        if self._arrivals.posted:
            self._timer = self._home.loop.call_later(timeouts.LAST_MESSAGES_S, self._report)
        else:
            self._report()

    def _report(self) -> None:
        self._stop_timer()
        if self._loss is None or self._reported:
            return
        self._reported = True
        for edge in self._edges:
            edge.end(self._loss)
        self._owner.on_lost(self._loss)

    def _on_edge_failed(self, error: Exception) -> None:
        """A transfer failed. Which of the ends that this may mean is left to the carrier, for a while."""
        if self._loss is not None:
            if not self._arrivals.posted:
                self._report()
        elif self._error is None and self._timer is None:
            lost = PeerLostError(self._peer, f"its edge failed: {error!s:.200}")
            self._timer = self._home.loop.call_later(timeouts.FAREWELL_TIMEOUT_S, self.on_lost, lost)

    def _on_arrival_failed(self, error: Exception) -> None:
        """A transfer to this rank failed: a message of which ``receive`` must not say nothing, farewell or not."""
        self._missed = self._missed or error
        if self._has_left:
            self._on_farewell()
        else:
            self._on_edge_failed(error)

    def _on_farewell(self) -> None:
        self._has_left = True
        if self._missed is not None:
            self.on_lost(PeerLostError(self._peer, f"{LEFT}, but its edge failed before: {self._missed!s:.200}"))
        else:
            self._stop_timer()
            self._fail(PeerLostError(self._peer, LEFT))

    async def _reason(self, error: Exception) -> RrfpError:
        """Why a transfer to the peer failed."""
        self._on_edge_failed(error)
        await self._failed.wait()
        assert self._error is not None
        return self._error

    def _fail(self, error: RrfpError) -> None:
        """Make all sends raise ``error``, unless they raise another one already."""
        if self._error is None:
            self._error = error
            self._failed.set()
        for outlet in self._outlets.values():
            outlet.window.fail(error)
        self._sender.end(error)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # This rank's end.

    async def leave(self) -> None:
        """See `LinkOf.leave`: the peer has received everything when it gets the farewell."""
        await self._sender.drained()
        if self._error is None:
            await self._tell_farewell()
        await self._owner.close_carrier()

    async def _tell_farewell(self) -> None:
        try:
            await self._carrier.send(self._peer, entry_of({FAREWELL: True}))
        except RrfpError:
            return  # it is gone

    def end(self, error: RrfpError) -> None:
        """See `LinkOf.end`."""
        self._stop_timer()
        self._reported = True
        self._credits.close()
        self._fail(error)
        for edge in self._edges:
            edge.end(error)
        for task in self._sending:
            task.cancel()

    def _send_credit(self, channel: str, cost: int, messages: int) -> None:
        self._post(entry_of({CREDIT: [channel, cost, messages]}))

    def _ask(self, channel: Channel) -> None:
        """A sender waits for room in ``channel``: have the peer return what it has consumed."""
        self._post(entry_of({WANT: [channel.value]}))

    def _post(self, entry: Message) -> None:
        """Send an entry without waiting; their order does not matter."""
        if self._at_once is None or not self._at_once.send_at_once(self._peer, entry):
            task = asyncio.create_task(self._send_later(entry))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def _send_later(self, entry: Message) -> None:
        try:
            await self._carrier.send(self._peer, entry)
        except RrfpError:
            return  # the peer needs it no more


def entry_of(body: Mapping[str, Plain]) -> Message:
    """A message between links, which `receive` never returns."""
    return Message(Channel.CONTROL, MessageKind.CONSUMED, body=body)
