"""The sum of tied gradients over stages, once a step: gathered on the rank with the first copy, and handed to all.

The others send their gradients as soon as the last task of their virtual stage is done, while lower stages still
compute. Gradients are large, so they travel in pieces on the data channels: to the first copy on BACKWARD, the sum on
FORWARD. All ranks take ties in one order, and send before they wait, so no two ranks wait for each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from rrfp.compute.gradients.tie_copies import Tie
from rrfp.compute.gradients.tied import Pieces, TiedGradients
from rrfp.core.tasks import StepId
from rrfp.core.topology import Placement, Topology
from rrfp.errors import ProtocolError
from rrfp.runtime.lane_executor import LaneWork
from rrfp.runtime.stall.progress import Progress
from rrfp.transports.base import Channel, Message, MessageKind

#: Sends a message of the step to the rank of a stage; returns when its memory is no longer read.
Send = Callable[[int, Message], Awaitable[None]]

#: Step, tie, and the virtual stage of the copy, or None for the sum.
_Key = tuple[int, str, int | None]


class TieSum:
    """One rank's part. All methods are called on the loop.

    Args:
        gradients: of this rank's copies, and the ties that all ranks agreed on.
        placement: where virtual stages live.
        place: where the rank is.
        work: runs the additions.
        progress: told of every message, and what is waited for.
        send: the way to the ranks of other stages.
    """

    def __init__(
        self,
        gradients: TiedGradients,
        placement: Placement,
        place: Topology,
        work: LaneWork,
        progress: Progress,
        send: Send,
    ) -> None:
        self._gradients = gradients
        self._place = place
        self._stage_of = placement.stage_of
        self._work = work
        self._progress = progress
        self._send = send
        own = frozenset(placement.virtual_stages(place.stage))
        #: Ties with a copy here, in the order of all ranks, and the virtual stages of those copies.
        here = ((tie, own.intersection(tie.virtual_stages)) for tie in gradients.ties)
        self._here = {tie.name: (tie, copies) for tie, copies in here if copies}
        #: Copies here whose virtual stage still has tasks in this step.
        self._unfinished: dict[str, set[int]] = {}
        self._arriving: dict[_Key, _Arriving] = {}
        self._awaited: list[str] = []
        progress.also_awaits = lambda: self._awaited

    def open(self) -> None:
        """A training step begins."""
        self._unfinished = {name: set(own) for name, (_, own) in self._here.items()}

    async def settle(self, virtual_stage: int, step: StepId, reduces: bool) -> None:
        """All tasks of ``virtual_stage`` are done: give away its copies' gradients, and wait for the sums.

        A sum is waited for with the last copy of a rank.

        Args:
            virtual_stage: which one.
            step: the step.
            reduces: whether the step reduces gradients; where it does not, only copies of one object are added up.

        Raises:
            StageError: if the gradients of the copies do not fit together.
            PeerLostError: if a rank with a copy is gone.
        """
        ties = [tie for tie, own in self._here.values() if virtual_stage in own and (reduces or tie.is_shared)]
        for tie in ties:
            if not self._leads(tie):
                gradient = await self._on_lane(tie, partial(self._gradients.pieces, tie.name, virtual_stage))
                await self._send_pieces(step, tie, virtual_stage, gradient, [self._leader(tie)])
        for tie in ties:
            self._unfinished[tie.name].discard(virtual_stage)
            if not self._unfinished[tie.name]:
                await (self._lead(tie, step) if self._leads(tie) else self._follow(tie, step))

    def take(self, message: Message) -> None:
        """A TIE message arrived.

        Raises:
            ProtocolError: if it makes no sense.
        """
        self._progress.received += 1
        self._progress.touch()
        key, told = self._check(message)
        self._arriving.setdefault(key, _Arriving()).add(told, message)

    async def _lead(self, tie: Tie, step: StepId) -> None:
        """Add up the copies of all ranks, and send the sum."""
        _, own = self._here[tie.name]
        others = [v for v in tie.virtual_stages if v not in own]
        found: dict[int, Pieces] = {}
        with self._waits_for(*(f"the gradients of tie {tie.name!r} from stage {self._stage_of(v)}" for v in others)):
            for v in others:
                found[v] = await self._arrived((step.number, tie.name, v))
        total = await self._on_lane(tie, partial(self._gradients.add, tie.name, found))
        found.clear()
        await self._send_pieces(step, tie, None, total, sorted({self._stage_of(v) for v in others}))

    async def _follow(self, tie: Tie, step: StepId) -> None:
        """Wait for the sum."""
        with self._waits_for(f"the sum of tie {tie.name!r} from stage {self._leader(tie)}"):
            total = await self._arrived((step.number, tie.name, None))
        await self._on_lane(tie, partial(self._gradients.put, tie.name, total))

    async def _send_pieces(
        self, step: StepId, tie: Tie, virtual_stage: int | None, gradient: Pieces, stages: Sequence[int]
    ) -> None:
        channel = Channel.FORWARD if virtual_stage is None else Channel.BACKWARD
        pieces: tuple[Tensor | None, ...] = gradient.tensors or (None,)
        told = {"tie": tie.name, "copy": virtual_stage, "layout": gradient.layout, "learns": gradient.learns}
        for index, piece in enumerate(pieces):
            body = {**told, "piece": index, "pieces": len(pieces)}
            for stage in stages:
                await self._send(stage, Message(channel, MessageKind.TIE, step, tensors=(piece,), body=body))

    async def _arrived(self, key: _Key) -> Pieces:
        arriving = self._arriving.setdefault(key, _Arriving())
        await arriving.whole.wait()
        del self._arriving[key]
        return arriving.pieces()

    async def _on_lane(self, tie: Tie, call: Callable[[], Any]) -> Any:
        return await self._work.chore(f"the gradients of tie {tie.name!r}", call)

    def _leader(self, tie: Tie) -> int:
        return self._stage_of(tie.virtual_stages[0])

    def _leads(self, tie: Tie) -> bool:
        return self._leader(tie) == self._place.stage

    @contextmanager
    def _waits_for(self, *what: str) -> Iterator[None]:
        self._awaited += what
        try:
            yield
        finally:
            for each in what:
                self._awaited.remove(each)

    def _check(self, message: Message) -> tuple[_Key, Mapping[str, Any]]:
        """Whose gradient a message has.

        Raises:
            ProtocolError: if it is for another step, rank or copy.
        """
        told, step, sender = message.body, message.step, message.sender
        match told:
            case {"tie": str(name), "copy": int() | None as copy, "layout": int(), "learns": bool(), "piece": int()}:
                pass
            case _:
                raise ProtocolError(f"rank {sender} sent gradients of a tie that cannot be read")
        now = self._progress.steps_ended
        if step is None or step.number not in (now, now + 1) or len(message.tensors) != 1:
            raise ProtocolError(
                f"rank {sender} sent gradients of tie {name!r} for {step}; step {now} is next or running"
            )
        tie, _ = self._here.get(name, (None, ()))
        if tie is None or (copy is None) is self._leads(tie) or copy not in (None, *tie.virtual_stages):
            raise ProtocolError(
                f"rank {sender} sent gradients of tie {name!r} that are not for rank {self._place.rank}"
            )
        if sender != self._place.rank_of(self._leader(tie) if copy is None else self._stage_of(copy)):
            raise ProtocolError(f"rank {sender} sent gradients of tie {name!r} that are another rank's")
        return (step.number, name, copy), told


class _Arriving:
    """The pieces of one gradient that are here, in any order."""

    def __init__(self) -> None:
        self.whole = asyncio.Event()
        self._told: Mapping[str, Any] = {}
        self._tensors: dict[int, Tensor | None] = {}

    def add(self, told: Mapping[str, Any], message: Message) -> None:
        """Another piece.

        Raises:
            ProtocolError: if it contradicts those before it.
        """
        before = {**self._told, "piece": None}
        count, index = told.get("pieces"), told["piece"]
        if not isinstance(count, int) or not 0 <= index < count or index in self._tensors:
            raise ProtocolError(f"rank {message.sender} sent piece {index} of {count} of tie {told['tie']!r}")
        if self._told and before != {**told, "piece": None}:
            raise ProtocolError(f"rank {message.sender} sent pieces of tie {told['tie']!r} that contradict each other")
        self._told = told
        (self._tensors[index],) = message.tensors
        if len(self._tensors) == count:
            self.whole.set()

    def pieces(self) -> Pieces:
        """All of them."""
        ordered = (self._tensors[index] for index in range(len(self._tensors)))
        return Pieces(self._told["layout"], self._told["learns"], tuple(t for t in ordered if t is not None))
