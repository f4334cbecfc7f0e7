"""Where the ends of one process meet: the part of `inproc` that several threads share.

The hub, the inbox of an end and the windows of its peers have a lock each, and no lock is acquired while another is
held, so they cannot deadlock.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from functools import partial
from typing import Any

from rrfp.errors import ConfigError, PeerLostError, RrfpError, TransportError
from rrfp.transports.base import Channel, Message, TransportContext
from rrfp.transports.flow import HomeLoop, Inbox, Window


class _Outbound:
    """One channel to one peer: the senders' lock, and the bytes that the peer has yet to consume."""

    def __init__(self, limit: int, home: HomeLoop) -> None:
        self.turn = asyncio.Lock()
        self.window = Window(limit, home)
        self.sequence = 0


class PeerEnd:
    """The part of a rank's transport that its peers call from their own threads."""

    def __init__(self, context: TransportContext) -> None:
        self.rank = context.rank
        self.copies = context.copies
        self.has_left = False  # guarded by the hub's lock
        self.departed: set[int] = set()  # peers that left while this end was there; guarded likewise
        self.home = HomeLoop()
        self.inbox = Inbox(self.home)
        self.outbound = {
            (peer, channel): _Outbound(context.queue_bytes, self.home) for peer in context.peers for channel in Channel
        }

    def deliver(self, message: Message, window: Window, cost: int) -> None:
        """Queue a peer's message; ``receive`` releases ``cost`` bytes of ``window``."""
        self.inbox.put(message, partial(window.release, cost), first=message.channel is Channel.CONTROL)

    def on_peer_left(self, peer: int, reason: str, *, lost: bool) -> None:
        """Fail sends to ``peer``; if it is ``lost`` instead of closed, ``receive`` raises, after its messages."""
        error = PeerLostError(peer, reason)
        self.fail(error, peer)
        if lost:
            self.inbox.put(error)

    def fail(self, error: RrfpError, peer: int | None = None) -> None:
        """Make sends to ``peer``, or to all, raise ``error``."""
        for (rank, _), outbound in self.outbound.items():
            if peer in (None, rank):
                outbound.window.fail(error)


class Hub:
    """The ends that share one rendezvous object, by (run id, restart, rank)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: dict[tuple[str, int, int], PeerEnd] = {}

    def join(self, context: TransportContext, end: PeerEnd) -> None:
        """Add the end of a rank; a ConfigError if it has one already."""
        key = (context.run_id, context.restart, context.rank)
        with self._lock:
            if key in self._ends:
                raise ConfigError(f"rank {context.rank} of run {context.run_id!r} has a transport already")
            self._ends[key] = end

    def find(self, context: TransportContext, rank: int, name: str) -> PeerEnd:
        """The end of a peer that has joined.

        Raises:
            ConfigError: if it joined in another process.
            TransportError: if it left before this rank joined. For a peer that left later, `receive` and `send` raise.
        """
        with self._lock:
            end = self._ends.get((context.run_id, context.restart, rank))
            if end is None:
                raise ConfigError(f"rank {rank} is in another process; {name} joins the ranks of one: use zmq")
            own = self._ends[context.run_id, context.restart, context.rank]
            if end.has_left and rank not in own.departed:
                raise TransportError(f"rank {rank} connected, then left")
            return end

    def leave(self, context: TransportContext, end: PeerEnd) -> list[PeerEnd]:
        """Mark ``end`` as left; returns the peers to notify: those that have joined."""
        with self._lock:
            end.has_left = True
            keys = ((context.run_id, context.restart, rank) for rank in context.peers)
            peers = [self._ends[key] for key in keys if key in self._ends]
            for peer in peers:
                peer.departed.add(end.rank)
            return peers


_hubs: weakref.WeakKeyDictionary[Any, Hub] = weakref.WeakKeyDictionary()
_hubs_lock = threading.Lock()


def hub_of(rendezvous: object) -> Hub:
    """The hub of all ends with this rendezvous."""
    with _hubs_lock:
        return _hubs.setdefault(rendezvous, Hub())
