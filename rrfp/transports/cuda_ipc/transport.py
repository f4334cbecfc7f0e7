"""For ranks on devices: `PulledTransport` with the peers of this host where a trial works, staging with all others.

Only the carrier of the pulled tensors, and what stages, see the host's memory; both are shm or zmq, as `auto` chooses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from rrfp.devices.copies import SharesDeviceMemory, held_by
from rrfp.errors import FrameError, RrfpError, TransportClosedError, TransportError
from rrfp.log import get_logger
from rrfp.transports.auto import AutoTransport, log_choice
from rrfp.transports.base import Channel, Message, Transport, TransportContext
from rrfp.transports.by_peer import ByPeerTransport
from rrfp.transports.carried.announcements import EDGE
from rrfp.transports.carried.arrivals import AnnouncedReceives, Arriving
from rrfp.transports.carried.link import TunnelLink, TunnelOwner, entry_of
from rrfp.transports.carried.outlet import Sender
from rrfp.transports.carried.transport import CarriedTransport
from rrfp.transports.carried.wires import Backend, Edge
from rrfp.transports.cuda_ipc.announcements import (
    PULLED,
    SHARED,
    SharedTensors,
    check_body,
    shared,
    shared_announcement,
)
from rrfp.transports.cuda_ipc.trial import try_pulls
from rrfp.transports.flow import HomeLoop, settle
from rrfp.transports.header_checks import HeaderChecks
from rrfp.transports.host_choice import HostChoice
from rrfp.transports.shm.transport import ShmTransport
from rrfp.transports.shm.trial import Host, this_host
from rrfp.transports.staged import StagedTransport
from rrfp.transports.tensor_bytes import check_sendable

_log = get_logger(__name__)

#: A message with more device tensors is staged: their fields would not fit into a header.
MOST_SHARED = 128


class SharingSender(Sender):
    """See `Sender`.

    Args:
        peer: its rank.
        carrier: moves announcements, and messages without device tensors; stages those of others.
        copies: shares memory.
        max_message_bytes: the most that a message may have.
        reason: finds out why a transfer failed.
        home: the loop.
    """

    def __init__(
        self,
        peer: int,
        carrier: Transport,
        copies: SharesDeviceMemory,
        max_message_bytes: int,
        reason: Callable[[Exception], Awaitable[RrfpError]],
        home: HomeLoop,
    ) -> None:
        super().__init__(peer, carrier, None, None, max_message_bytes, reason)
        self._copies = copies
        self._home = home
        self._number = 0
        #: By number, the announcements that the peer has not pulled.
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._error: RrfpError | None = None
        self._has_warned = False

    def check(self, message: Message, num_bytes: int) -> None:
        """See `Sender.check`."""
        super().check(message, num_bytes)
        check_body(message.body)

    def on_edge(self, message: Message) -> list[bool]:
        """For each tensor whether the peer pulls it; empty where the carrier moves the whole message."""
        tensors = message.tensors
        indices = held_by(self._copies, tensors) if message.channel is not Channel.CONTROL else []
        if not 0 < len(indices) <= MOST_SHARED:
            return []
        for tensor in tensors:
            if tensor is not None:
                check_sendable(tensor, self._copies)
        moved = [False] * len(tensors)
        for index in indices:
            moved[index] = True
        return moved

    async def begin(self, message: Message, on_edge: list[bool]) -> Awaitable[None] | None:
        """Pass a message to the carrier; returns the end of the peer's pull, if it pulls."""
        tensors = [t for t, moved in zip(message.tensors, on_edge, strict=False) if moved and t is not None]
        try:
            shared = await self._copies.share(tensors) if tensors else []
        except OSError as error:
            self._warn(error)
            shared = []
        if not shared:
            await self.carrier.send(self.peer, message)
            return None
        number, self._number = self._number, self._number + 1
        pulled = self._waiting[number] = self._home.loop.create_future()
        pulled.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            if self._error is not None:
                raise type(self._error)(*self._error.args)
            await self.carrier.send(
                self.peer, shared_announcement(message, number, on_edge, [fields for fields, _ in shared])
            )
        except BaseException:
            del self._waiting[number]
            raise
        # Until the peer has pulled, this callback keeps the memory.
        pulled.add_done_callback(lambda _: shared.clear())
        return pulled

    def on_pulled(self, number: int) -> None:
        """The peer has pulled an announcement; a FrameError if it cannot have."""
        if (pulled := self._waiting.pop(number, None)) is None:
            raise FrameError(self.peer, "pulled_tensors", f"is {number}, which was not announced")
        settle(pulled, None)

    def end(self, error: RrfpError) -> None:
        """See `Sender.end`."""
        self._error = self._error or error
        for pulled in self._waiting.values():
            settle(pulled, type(error)(*error.args))
        self._waiting.clear()

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning("device tensors for rank %d pass through host memory: %s", self.peer, error)


class Pulls(AnnouncedReceives):
    """See the module's docstring. Used on one loop only.

    Args:
        copies: pulls.
        max_message_bytes: larger announced messages are refused.
        deliver: takes whole messages, and the bytes of their tensors.
        on_pulled: takes the number of an announcement whose memory is not read any more.
        on_failed: takes the error of memory that cannot be opened.
        on_broken: takes the error of a device that failed.
    """

    def __init__(
        self,
        copies: SharesDeviceMemory,
        max_message_bytes: int,
        deliver: Callable[[Message, int], None],
        on_pulled: Callable[[int], None],
        on_failed: Callable[[Exception], None],
        on_broken: Callable[[RrfpError], None],
    ) -> None:
        super().__init__(None, None, max_message_bytes, deliver, on_failed)
        self._copies = copies
        self._on_pulled = on_pulled
        self._on_broken = on_broken
        self._pulling: set[asyncio.Task[None]] = set()

    def add(self, message: Message) -> None:
        """See `AnnouncedReceives.add`."""
        if EDGE not in message.body and SHARED not in message.body:
            self._queue(message.channel, Arriving(message, message.num_bytes))
            return
        if message.channel is Channel.CONTROL:
            raise FrameError(message.sender, SHARED, "announces tensors of a control message, which brings them itself")
        announced = shared(message, self._max_message_bytes, self._copies.check_shared)
        arriving = Arriving(None, announced.whole.num_bytes)
        self._queues[message.channel].append(arriving)
        self.posted += 1
        task = asyncio.create_task(self._pull(announced, arriving))
        self._pulling.add(task)
        task.add_done_callback(self._pulling.discard)

    async def _pull(self, announced: SharedTensors, arriving: Arriving) -> None:
        whole, channel = announced.whole, announced.whole.message.channel
        try:
            tensors = await self._copies.pull(announced.fields, announced.specs)
        except TransportClosedError:
            self.posted -= 1
        except OSError as error:
            self._on_ended(announced)
            self._on_failed(error)
        except Exception as error:
            self._on_ended(announced)
            self._queues[channel].remove(arriving)
            self._flush(channel)
            self._on_broken(_failure(error, whole.message))
        else:
            self._on_ended(announced)
            arriving.message = whole.assemble(tensors)
            self._flush(channel)

    def _on_ended(self, announced: SharedTensors) -> None:
        """The sender's memory is not read any more."""
        self.posted -= 1
        self._on_pulled(announced.number)

    def end(self) -> None:
        """Give up all pulls, whose copies end by themselves. May be called twice."""
        for task in self._pulling:
            task.cancel()


def _failure(error: Exception, message: Message) -> TransportError:
    failure = TransportError(
        f"{type(error).__name__}: {error}, while tensors of {message.kind} {message.task} from rank {message.sender} "
        "were received"
    )
    failure.__cause__ = error
    return failure


class PullLink(TunnelLink):
    """The connection to one peer; see `rrfp.transports.linked.LinkFactory`."""

    def __init__(
        self, peer: int, owner: TunnelOwner, carrier: Transport, copies: SharesDeviceMemory, home: HomeLoop
    ) -> None:
        self._copies = copies
        super().__init__(peer, owner, carrier, None, None, None, home)

    def _new_sender(self, edge: Edge | None, backend: Backend | None) -> SharingSender:
        limit = self._owner.context.max_message_bytes
        self._sharing = SharingSender(self._peer, self._carrier, self._copies, limit, self._reason, self._home)
        return self._sharing

    def _new_arrivals(self, edge: Edge | None, backend: Backend | None) -> Pulls:
        self._pulls = Pulls(
            self._copies,
            self._owner.context.max_message_bytes,
            self._on_whole,
            self._acknowledge,
            self._on_arrival_failed,
            self._owner.on_failure,
        )
        return self._pulls

    def _acknowledge(self, number: int) -> None:
        self._post(entry_of({PULLED: number}))

    def on_message(self, message: Message) -> None:
        """See `TunnelLink.on_message`."""
        if PULLED not in message.body:
            super().on_message(message)
            return
        try:
            self._sharing.on_pulled(HeaderChecks(message.sender).integer(PULLED, message.body[PULLED]))
        except FrameError as error:
            self._owner.on_bad_frame(error)

    def end(self, error: RrfpError) -> None:
        """See `LinkOf.end`."""
        super().end(error)
        self._pulls.end()


class PulledTransport(CarriedTransport):
    """Ranks of one host that can open each other's device memory: the receiver copies each tensor out of it.

    A sender shares the memory of a message's device tensors when they are complete, and announces it over the carrier
    with all else of the message. The receiver copies the tensors into memory of its own device at once, and
    acknowledges that, which ends ``send``. No kernel waits for another rank. Both ends bound what is under way by
    windows of ``queue_bytes`` for each peer and channel, acquired before the announcement and released when ``receive``
    has returned the message.

    Args:
        context: this rank, its peers and the limits. All of the peers have such a transport.
        carrier: of the host's tensors; not started.
        copies: of this rank's device; the caller closes them.
    """

    def __init__(self, context: TransportContext, carrier: Transport, copies: SharesDeviceMemory) -> None:
        # The carrier stages device tensors of control messages, and those whose memory cannot be shared.
        super().__init__(context, StagedTransport(carrier, copies, owns_copies=False))
        self.carries |= {copies.kind}
        self._copies = copies

    async def _connect(self, home: HomeLoop, deadline_s: float) -> None:
        await self._carrier.start()
        self._check_open()
        self._attach({peer: PullLink(peer, self, self._carrier, self._copies, home) for peer in self.context.peers})
        self._receive_all()


class CudaIpcTransport(ByPeerTransport[Transport]):
    """Device tensors are pulled by peers on the same host, or staged through host memory; all else as with `auto`.

    A rank that computes on the CPU, or on a device whose memory cannot be shared, may be a peer of one that pulls.
    """

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        if context.copies is not None:
            self.carries |= {context.copies.kind}

    def _host(self) -> Host:
        return this_host(self.context.max_message_bytes)

    async def _choose(self, home: HomeLoop, deadline_s: float) -> Sequence[Transport]:
        context, copies = self.context, self.context.copies
        sharing = copies if isinstance(copies, SharesDeviceMemory) else None
        choice = HostChoice(context, self._host(), "" if sharing is None else sharing.sharing)
        await choice.look(home, deadline_s)
        self._check_open()
        obstacles: dict[int, str] = {}
        if sharing is not None:
            near = [peer for peer in context.peers if not choice.obstacles[peer]]
            like = [peer for peer in near if choice.sharing[peer] == sharing.sharing]
            obstacles = await try_pulls(context, sharing, like, deadline_s)
            self._check_open()
        log_choice(context.rank, {peer: _describe(peer, choice, obstacles) for peer in context.peers})
        pulled = tuple(peer for peer, obstacle in obstacles.items() if not obstacle)
        others = tuple(peer for peer in context.peers if peer not in pulled)
        inners: list[Transport] = []
        if sharing is not None and pulled:
            # A run of its own: this rank may have another end of shm, with the other peers.
            own = replace(context, peers=pulled, run_id=f"{context.run_id}/cuda_ipc")
            inners.append(PulledTransport(own, ShmTransport(own), sharing))
        if others or not pulled:
            rest = AutoTransport(replace(context, peers=others), choice)
            inners.append(rest if copies is None else StagedTransport(rest, copies, owns_copies=False))
        return inners

    async def close(self) -> None:
        """See `Transport.close`."""
        try:
            await super().close()
        finally:
            self._close_copies()

    def abort(self) -> None:
        """See `Transport.abort`."""
        super().abort()
        self._close_copies()

    def _close_copies(self) -> None:
        if self.context.copies is not None:
            self.context.copies.close()


def _describe(peer: int, choice: HostChoice, obstacles: dict[int, str]) -> str:
    """The choice for a peer; with the reason where it does not pull, though the devices could."""
    chosen = choice.describe(peer)
    if peer not in obstacles:
        return chosen
    obstacle = obstacles[peer]
    return f"{chosen}, device tensors through host memory ({obstacle})" if obstacle else f"cuda_ipc over {chosen}"
