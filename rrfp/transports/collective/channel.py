"""A P2P channel over two process groups of two ranks, one for each direction: transfers match by the order of posts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from rrfp.devices.base import CopyLane
from rrfp.errors import FrameError, RrfpError
from rrfp.transports.base import Channel, Plain
from rrfp.transports.links.flow import settle
from rrfp.transports.tunnel.announcements import BESIDE, ENTRY
from rrfp.transports.tunnel.link import TunnelLink
from rrfp.transports.tunnel.p2p import P2PError
from rrfp.transports.wire.header_checks import TensorSpec


@dataclass(frozen=True, order=True, slots=True)
class RankPair:
    """Source and target of a group; ranks make theirs in ascending order."""

    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.source}->{self.target}"


class PairGroup(Protocol):
    """One rank's end of a process group of two, used one way."""

    #: Where `move` is called, in the order of numbers; not started.
    lane: CopyLane
    #: Whether the number tells transfers apart, so that one may be left out.
    has_tags: bool

    def move(self, number: int, tensors: Sequence[Tensor]) -> None:
        """Move tensors that are not empty: complete on return, or on the lane's stream."""

    def abort(self) -> None:
        """End transfers under way, and free all but the lane. Never waits."""


class Backend(Protocol):
    """Makes the groups of one rank."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether a group can move a tensor."""

    def empty(self, spec: TensorSpec) -> Tensor:
        """A dense tensor to receive into, which no stream uses."""

    def connect(self, pair: RankPair, store: Any, timeout_s: float) -> PairGroup:
        """Make this rank's end. Waits for the other end; called on a helper thread."""


class _OneWay:
    """The transfers of one direction."""

    def __init__(self, group: PairGroup) -> None:
        self.group = group
        #: Of the next transfer.
        self.number = 0
        self._pending: set[asyncio.Future[Any]] = set()
        self._error: RrfpError | None = None
        group.lane.start()

    def new_future(self) -> asyncio.Future[Any]:
        """For the end of a transfer, whose error may go unread."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        return future

    def post(self, tensors: Sequence[Tensor], done: asyncio.Future[Any], result: Any = None) -> None:
        """Begin the next transfer; ``done`` gets ``result``, or the error."""
        number, self.number = self.number, self.number + 1
        if self._error is not None:
            settle(done, type(self._error)(*self._error.args))
        elif not (filled := [tensor for tensor in tensors if tensor.numel()]):
            settle(done, None, result)
        else:
            self._pending.add(done)
            moving = self.group.lane.enqueue(partial(_move, self.group, number, filled))
            moving.add_done_callback(partial(self._on_moved, done, result))

    def _on_moved(self, done: asyncio.Future[Any], result: Any, moving: asyncio.Future[Any]) -> None:
        self._pending.discard(done)
        error = moving.exception()
        settle(done, None if error is None else P2PError(str(error)), result)

    def end(self, error: RrfpError) -> None:
        """Fail all transfers."""
        if self._error is None:
            self._error = error
            for done in self._pending:
                settle(done, type(error)(*error.args))
            self.group.lane.close()
            self.group.abort()


def _move(group: PairGroup, number: int, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    group.move(number, tensors)
    return tensors  # which the lane keeps until its stream is done with them


#: An announced transfer: its tensors, and what waits for them.
_Announced = tuple[Sequence[TensorSpec], "asyncio.Future[list[Tensor]]"]


class GroupChannel:
    """See `P2PChannel`."""

    def __init__(self, outgoing: PairGroup, incoming: PairGroup, backend: Backend, link: TunnelLink) -> None:
        self._outgoing = _OneWay(outgoing)
        self._incoming = _OneWay(incoming)
        self._backend = backend
        self._peer = link.peer
        #: By number, announced transfers that wait for earlier ones; None for those that are left out.
        self._early: dict[int, _Announced | None] = {}
        self._is_out_of_step = False

    def moves(self, tensor: Tensor) -> bool:
        """See `P2PChannel.moves`."""
        # The base transport can bring empty tensors of the host, and has their dtype and shape in its header.
        return self._backend.holds(tensor) and not (tensor.is_cpu and tensor.numel() == 0)

    async def prepare(self, tensors: Sequence[Tensor]) -> GroupTransfer:
        """See `P2PChannel.prepare`."""
        return GroupTransfer(self._outgoing, tensors)

    def receive(self, number: int, specs: Sequence[TensorSpec], fields: Plain) -> Awaitable[list[Tensor]]:
        """See `P2PChannel.receive`."""
        received = self._incoming.new_future()
        self._add(number, (specs, received))
        return received

    def refuse(self, number: int, fields: Plain) -> bool:
        """See `P2PChannel.refuse`."""
        self._add(number, None)
        return self._incoming.group.has_tags

    def _add(self, number: int, announced: _Announced | None) -> None:
        """Post all transfers whose turn has come."""
        if number < self._incoming.number or number in self._early:
            raise FrameError(self._peer, f"{BESIDE}.number", f"is {number}, which was announced before")
        self._early[number] = announced
        while (number := self._incoming.number) in self._early:
            self._post(self._early.pop(number))

    def _post(self, announced: _Announced | None) -> None:
        reason = "it comes after one that was left out"  # whose bytes would be taken for its own
        if announced is not None and not self._is_out_of_step:
            try:
                tensors = [self._backend.empty(spec) for spec in announced[0]]
            except (MemoryError, RuntimeError) as error:  # torch raises the latter where memory is short
                reason = str(error)
            else:
                self._incoming.post(tensors, announced[1], tensors)
                return
        self._incoming.number += 1  # which the other end may have posted
        self._is_out_of_step = not self._incoming.group.has_tags
        if announced is not None:
            settle(announced[1], P2PError(reason))

    def on_entry(self, fields: Plain) -> None:
        """See `P2PChannel.on_entry`."""
        raise FrameError(self._peer, ENTRY, "comes from no end of a process group")

    async def close(self) -> None:
        """See `P2PChannel.close`: nothing is left behind a transfer."""

    def end_sending(self, error: RrfpError) -> None:
        """See `P2PChannel.end_sending`."""
        self._outgoing.end(error)

    def end(self, error: RrfpError) -> None:
        """See `P2PChannel.end`."""
        self._outgoing.end(error)
        self._incoming.end(error)


@dataclass(frozen=True, slots=True)
class GroupTransfer:
    """See `Transfer`."""

    outgoing: _OneWay
    tensors: Sequence[Tensor]
    fields: Plain = None

    def start(self, number: int, channel: Channel) -> Awaitable[None]:
        """See `Transfer.start`."""
        sent = self.outgoing.new_future()
        self.outgoing.post(self.tensors, sent)
        return sent
