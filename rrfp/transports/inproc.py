"""The reference transport: ranks of one process, each on its own event loop or all on one. Written to be read.

A message is copied on the sender's loop and put into the receiver's inbox; tensors on a device are copied there, on a
stream of the sender's `DeviceCopies`, and never touch host memory. Ends that share a rendezvous object, run id
and restart find each other through a hub; see `rrfp.transports.inproc` for what threads share.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rrfp.devices.copies import DeviceCopies, held_by, with_copies
from rrfp.errors import ConfigError, PeerLostError, RrfpError, TransportClosedError, TransportError
from rrfp.transports.base import Channel, Message, Transport, TransportContext, TransportStatistics
from rrfp.transports.links.flow import CLOSED, HomeLoop, Inbox, Window, cost_of
from rrfp.transports.links.pool import BufferPool
from rrfp.transports.rendezvous import publish_in_time
from rrfp.transports.wire.codec import copy_body
from rrfp.transports.wire.tensor_bytes import as_bytes, check_sendable, copy_bytes, from_buffer


class _Outbound:
    """One channel to one peer, and its senders' turn."""

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
        """Fail sends to ``peer``; if it is ``lost``, ``receive`` raises too."""
        error = PeerLostError(peer, reason)
        self.fail(error, peer)
        if lost:
            self.inbox.put(error)

    def fail(self, error: RrfpError, peer: int | None = None) -> None:
        for (rank, _), outbound in self.outbound.items():
            if peer in (None, rank):
                outbound.window.fail(error)


class Hub:
    """The ends that share one rendezvous object, by (run id, restart, rank), on any number of threads."""

    # The hub, the inbox of an end and the windows of its peers have a lock each, and no lock is acquired while another
    # is held, so they cannot deadlock.

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
    with _hubs_lock:
        return _hubs.setdefault(rendezvous, Hub())


#: A larger tensor is copied in slices of this many bytes, and the loop runs in between.
SLICE_BYTES = 1 << 20


class InprocTransport(Transport):
    """The reference transport, between the ranks of one process, on one event loop or several."""

    # A peer is lost when its end is aborted, or when its loop ends before the end was closed.

    name = "inproc"

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        if context.copies is not None:
            self.carries |= {context.copies.kind}
        self._hub = hub_of(context.rendezvous)
        self._pool = BufferPool()
        self._end: PeerEnd | None = None
        self._peers: dict[int, PeerEnd] = {}
        self._guard: asyncio.Task[None] | None = None
        self._closed = False
        self._sent = self._sent_bytes = self._received = self._received_bytes = 0

    async def start(self) -> None:
        """Join the hub and wait for every peer."""
        if self._end is not None or self._closed:
            raise TransportClosedError("a transport starts once")
        context = self.context
        end = PeerEnd(context)
        self._hub.join(context, end)
        self._end = end
        try:
            self._guard = asyncio.create_task(self._abort_with_loop(), name=f"rrfp-inproc-{context.rank}")
            await publish_in_time(context, self._key(context.rank), b"")
            deadline_s = end.home.loop.time() + context.connect_timeout_s
            for peer in context.peers:
                self._peers[peer] = await self._connect(peer, deadline_s - end.home.loop.time())
        except BaseException:
            self.abort()
            raise

    def _key(self, rank: int) -> str:
        return f"{self.name}/{self.context.run_id}/{self.context.restart}/{rank}"

    async def _connect(self, peer: int, timeout_s: float) -> PeerEnd:
        try:
            await self.context.rendezvous.lookup(self._key(peer), max(timeout_s, 0.0))
        except TransportError as error:
            raise TransportError(f"rank {peer} did not connect: {error}") from error
        if self._closed:
            raise TransportClosedError(CLOSED)
        return self._hub.find(self.context, peer, self.name)

    async def _abort_with_loop(self) -> None:
        # Ends with the loop: asyncio.run cancels it, and a loop that is dropped destroys it. Peers on other loops would
        # otherwise wait for an end that no loop serves any more.
        try:
            await self._open_end().home.loop.create_future()
        finally:
            self._guard = None
            self.abort()

    def _open_end(self) -> PeerEnd:
        if self._end is None or self._closed:
            raise TransportClosedError(CLOSED if self._closed else "the transport is not started")
        return self._end

    async def send(self, peer: int, message: Message) -> None:
        """Copy ``message`` into the peer's inbox; see `Transport.send`. Cancelled, it has sent nothing."""
        end = self._open_end()
        outbound = end.outbound.get((peer, message.channel))
        if outbound is None or peer not in self._peers:
            raise ConfigError(f"peer is {peer}, must be one of: {', '.join(map(str, self.context.peers))}")
        num_bytes, limit = message.num_bytes, self.context.max_message_bytes
        if num_bytes > limit:
            raise ConfigError(f"message has {num_bytes} bytes, max_message_bytes is {limit}")
        cost, body = cost_of(num_bytes), copy_body(message.body)
        async with outbound.turn:
            await outbound.window.acquire(cost)
            try:
                tensors = await self._copies_of(message, self._peers[peer].copies)
                outbound.window.check()  # the peer may have left while the loop ran
            except BaseException:
                outbound.window.release(cost)
                raise
            copy = Message(
                message.channel,
                message.kind,
                message.step,
                message.task,
                tensors,
                body,
                sequence=outbound.sequence,
                sender=end.rank,
            )
            outbound.sequence += 1
            self._sent += 1
            self._sent_bytes += num_bytes
            self._deliver(peer, copy, outbound.window, cost)

    def _deliver(self, peer: int, message: Message, window: Window, cost: int) -> None:
        """Hand a copied message to the peer; a subclass may do so later."""
        self._peers[peer].deliver(message, window, cost)

    async def _copies_of(self, message: Message, target: DeviceCopies | None) -> tuple[Tensor | None, ...]:
        """Copies of all tensors, on the device of ``target`` or on the CPU."""
        tensors: Sequence[Tensor | None] = message.tensors
        copies = self.context.copies
        for tensor in tensors:
            if tensor is not None:
                check_sendable(tensor, copies)
        on_device = [] if copies is None else held_by(copies, tensors)
        if copies is not None and on_device:
            copy = copies.to_host if target is None else partial(copies.copy, target=target)
            tensors = await with_copies(tensors, on_device, copy)
        return tuple([t if i in on_device else await self._copy(t) for i, t in enumerate(tensors)])

    async def _copy(self, tensor: Tensor | None) -> Tensor | None:
        """A dense leaf with its own memory; yields every `SLICE_BYTES`."""
        if tensor is None:
            return None
        if tensor.numel() * tensor.itemsize <= SLICE_BYTES and not (tensor.is_conj() or tensor.is_neg()):
            return tensor.detach().clone(memory_format=torch.contiguous_format).requires_grad_(tensor.requires_grad)
        source = as_bytes(tensor)
        target = self._pool.acquire(source.nbytes)
        for start in range(0, source.nbytes, SLICE_BYTES):
            if start:
                await asyncio.sleep(0)
            copy_bytes(target[start : start + SLICE_BYTES], source[start : start + SLICE_BYTES])
        return from_buffer(target, tensor.dtype, tuple(tensor.shape), requires_grad=tensor.requires_grad)

    async def receive(self) -> Message:
        message = await self._open_end().inbox.get()
        self._received += 1
        self._received_bytes += message.num_bytes
        return message

    async def close(self) -> None:
        """See `Transport.close`; waits for copies under way."""
        if self._end is None or self._closed:
            self._closed = True
            return
        end = self._end
        end.inbox.close()
        end.fail(TransportClosedError(CLOSED))
        for outbound in end.outbound.values():
            async with outbound.turn:  # held by a send that still copies
                pass
        self._leave("it closed its end", lost=False)

    def abort(self) -> None:
        """Leave at once; the peers see this rank as lost."""
        self._leave("its end was aborted", lost=True)

    def _leave(self, reason: str, *, lost: bool) -> None:
        end, was_closed = self._end, self._closed
        self._closed = True
        if self.context.copies is not None:
            self.context.copies.close()
        if end is None or was_closed:
            return
        end.inbox.close()
        end.fail(TransportClosedError(CLOSED))
        for peer in self._hub.leave(self.context, end):
            peer.on_peer_left(end.rank, reason, lost=lost)
        if self._guard is not None and not end.home.loop.is_closed():
            self._guard.cancel()

    def statistics(self) -> TransportStatistics:
        """See `Transport.statistics`; bytes count as queued until the peer has received the message."""
        queued = 0 if self._end is None else sum(o.window.tensor_bytes for o in self._end.outbound.values())
        return TransportStatistics(
            messages_sent=self._sent,
            bytes_sent=self._sent_bytes,
            messages_received=self._received,
            bytes_received=self._received_bytes,
            queued_bytes=queued,
        )
