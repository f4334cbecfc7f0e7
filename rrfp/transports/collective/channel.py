"""A P2P channel over two process groups of two ranks, one for each direction: transfers match by the order of posts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

from rrfp.devices.base import CopyLane
from rrfp.errors import FrameError, RrfpError
from rrfp.transports.base import Channel, Plain
from rrfp.transports.links.flow import settle
from rrfp.transports.tunnel.link import TunnelLink
from rrfp.transports.tunnel.p2p import BESIDE, ENTRY, P2PError, Transfer
from rrfp.transports.wire.header_checks import TensorSpec

_Result = TypeVar("_Result")


class RankPair(NamedTuple):
    """Source and target of a group; ranks make theirs in ascending order."""

    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.source}->{self.target}"


class PairGroup(Protocol):
    """One rank's end of a process group of two, used one way."""

    #: Where `move` is called, in the order of numbers; not started.
    lane: CopyLane

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
    def __init__(self, group: PairGroup) -> None:
        self.group = group
        #: Of the next transfer.
        self.number = 0
        self._pending: set[asyncio.Future[Any]] = set()
        self._error: RrfpError | None = None
        group.lane.start()

    def post(
        self, tensors: Sequence[Tensor], done: asyncio.Future[_Result], result: Any = None
    ) -> asyncio.Future[_Result]:
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
        return done

    def _on_moved(self, done: asyncio.Future[Any], result: Any, moving: asyncio.Future[Any]) -> None:
        self._pending.discard(done)
        error = moving.exception()
        settle(done, None if error is None else P2PError(str(error)), result)

    def end(self, error: RrfpError) -> None:
        if self._error is None:
            self._error = error
            for done in self._pending:
                settle(done, type(error)(*error.args))
            self.group.lane.close()
            self.group.abort()


def _future() -> asyncio.Future[Any]:
    """For the end of a transfer, whose error may go unread."""
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


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
        self._link = link
        #: By number, announced transfers that wait for earlier ones; None for those that were refused.
        self._early: dict[int, _Announced | None] = {}
        #: Why no more is received: the bytes of a transfer that is left out would be taken for those of the next one.
        self._out_of_step = ""

    def moves(self, tensor: Tensor) -> bool:
        # The base transport can bring empty tensors of the host, and has their dtype and shape in its header.
        return self._backend.holds(tensor) and not (tensor.is_cpu and tensor.numel() == 0)

    async def prepare(self, tensors: Sequence[Tensor]) -> Transfer:
        return Transfer(None, partial(self._send, tensors))

    def _send(self, tensors: Sequence[Tensor], number: int, channel: Channel) -> Awaitable[None]:
        return self._outgoing.post(tensors, _future())

    def receive(self, number: int, specs: Sequence[TensorSpec], fields: Plain) -> Awaitable[list[Tensor]]:
        received: asyncio.Future[list[Tensor]] = _future()
        self._add(number, (specs, received))
        return received

    def refuse(self, number: int, fields: Plain) -> None:
        self._add(number, None)
        self._link.on_failed(P2PError("an announcement was refused, so later ones cannot be matched"))

    def _add(self, number: int, announced: _Announced | None) -> None:
        """Post all transfers whose turn has come."""
        if number < self._incoming.number or number in self._early:
            raise FrameError(self._link.peer, f"{BESIDE}.number", f"is {number}, which was announced before")
        self._early[number] = announced
        while (number := self._incoming.number) in self._early:
            self._post(self._early.pop(number))

    def _post(self, announced: _Announced | None) -> None:
        if announced is not None and not self._out_of_step:
            try:
                tensors = [self._backend.empty(spec) for spec in announced[0]]
            except (MemoryError, RuntimeError) as error:  # torch raises the latter where memory is short
                self._out_of_step = str(error)
            else:
                self._incoming.post(tensors, announced[1], tensors)
                return
        self._incoming.number += 1  # which the other end may have posted
        self._out_of_step = self._out_of_step or "it comes after one that was refused"
        if announced is not None:
            settle(announced[1], P2PError(self._out_of_step))

    def on_entry(self, fields: Plain) -> None:
        raise FrameError(self._link.peer, ENTRY, "comes from no end of a process group")

    async def close(self) -> None:
        """Nothing is left behind a transfer."""

    def end_sending(self, error: RrfpError) -> None:
        self._outgoing.end(error)

    def end(self, error: RrfpError) -> None:
        self._outgoing.end(error)
        self._incoming.end(error)
