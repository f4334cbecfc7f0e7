"""The state of the connection to one peer, and its three outlets.

Greeting (hello on every channel, then welcome back) -> open -> leaving in order (bye on every channel, farewell back)
or lost. Connecting a zmq socket succeeds before the peer listens, so only a frame that arrives shows that a channel is
open: hence a greeting on each. Knows no sockets; `ZmqLink` posts headers to outlets and receives frames from the inlet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from rrfp import timeouts
from rrfp.errors import FrameError, PeerLostError, RrfpError
from rrfp.transports.base import Channel
from rrfp.transports.links.flow import Credits, Window, apply_credit
from rrfp.transports.wire.codec import Codec, Sealed
from rrfp.transports.zmq.inlet import BYE, CREDIT, FAREWELL, HELLO, WANT, WELCOME, Route
from rrfp.transports.zmq.outlet import ZmqOutlet


class ZmqLink:
    """The connection to one peer. Used on one loop only.

    ``on_lost`` is called once when the peer is lost, after its last message.
    """

    def __init__(self, peer: int, codec: Codec, queue_bytes: int, on_lost: Callable[[PeerLostError], None]) -> None:
        self.peer = peer
        self.outlets: dict[Channel, ZmqOutlet] = {}
        self.is_connected = False
        self.opened = asyncio.Event()
        self.delivered = asyncio.Event()
        self._codec = codec
        self._on_lost = on_lost
        self._greeted: set[Channel] = set()
        self._byes: set[Channel] = set()
        self._ended: set[Channel] = set()
        self._credits = Credits(queue_bytes, partial(self._post, CREDIT))
        self._grace: asyncio.TimerHandle | None = None
        self._welcomed = False
        self._is_over = False

    def connect(self, outlets: dict[Channel, ZmqOutlet]) -> None:
        """Greet on each of the connected ``outlets``."""
        self.outlets = outlets
        for channel, outlet in outlets.items():
            outlet.post(self._codec.seal(HELLO, channel.value))
        self._welcome()

    def _welcome(self) -> None:
        if self.outlets and len(self._greeted) == len(Channel):
            self._post(WELCOME)
            self._open()

    def _open(self) -> None:
        if self._welcomed and self.outlets and len(self._greeted) == len(Channel):
            self.is_connected = True
            self.opened.set()

    def _post(self, kind: str, *fields: object) -> None:
        if self.outlets:
            self.outlets[Channel.CONTROL].post(self._codec.seal(kind, *fields))

    def ask(self, channel: Channel) -> None:
        """A sender waits for room in ``channel``: have the peer return what it has consumed."""
        self._post(WANT, channel.value)

    def on_frame(self, route: Route, sealed: Sealed) -> None:
        """Handle a frame of the link itself; a FrameError if a field is malformed, or it is out of place."""
        if sealed.kind == HELLO:
            if route.channel not in self._greeted:
                self._greeted.add(route.channel)
                self._welcome()
        elif sealed.kind == WELCOME:
            self._welcomed = True
            self._open()
        elif sealed.kind == CREDIT:
            apply_credit(sealed, self._window)
        elif sealed.kind == WANT:
            self._credits.want(sealed.sender, WANT, sealed.fields)
        elif sealed.kind == BYE:
            self._byes.add(route.channel)
            if len(self._byes) == len(Channel):
                self._on_left()
        elif sealed.kind == FAREWELL:
            self.delivered.set()

    def _window(self, channel: Channel) -> Window:
        outlet = self.outlets.get(channel)
        if outlet is None:
            raise FrameError(self.peer, "credit", "comes before the greeting")
        return outlet.window

    def consumed(self, channel: Channel, num_bytes: int) -> None:
        """``receive`` returned a message of ``channel``: its bytes become credit for the sender."""
        self._credits.consumed(channel, num_bytes)

    def _on_left(self) -> None:
        self._post(FAREWELL)
        for outlet in self.outlets.values():
            outlet.window.fail(PeerLostError(self.peer, "it closed its end"))

    def on_disconnected(self, channel: Channel) -> None:
        """An inbound connection ended, after all its frames were handled."""
        self._ended.add(channel)
        if len(self._byes) == len(Channel):
            if len(self._ended) == len(Channel):
                self.end(PeerLostError(self.peer, "it closed its end"))
        elif len(self._ended) == len(Channel):
            self._lose()
        elif self._grace is None:
            # The three connections of a process that dies end one by one, and the last may still carry the abort that
            # names the cause: it is read before the loss is reported.
            self._fail_sends(PeerLostError(self.peer, f"its {channel} connection ended"))
            self._grace = asyncio.get_running_loop().call_later(timeouts.BREAK_GRACE_S, self._lose)

    def _lose(self) -> None:
        if self._is_over:
            return
        error = PeerLostError(self.peer, "its connection ended or fell silent")
        self.end(error)
        self._on_lost(error)

    def end(self, error: RrfpError) -> None:
        """Free all resources; sends raise the first ``error`` passed. May be called twice."""
        self._is_over = True
        self.opened.set()
        self.delivered.set()
        if self._grace is not None:
            self._grace.cancel()
        self._credits.close()
        self._fail_sends(error)

    def _fail_sends(self, error: RrfpError) -> None:
        for outlet in self.outlets.values():
            outlet.fail(error)

    async def leave(self) -> None:
        """Deliver the accepted messages, send bye and wait for farewell; returns at once when the peer is gone."""
        if self._is_over or len(self._byes) == len(Channel):
            return
        with suppress(RrfpError):
            for outlet in self.outlets.values():
                await outlet.post_in_turn(self._codec.seal(BYE))
            await self.delivered.wait()
