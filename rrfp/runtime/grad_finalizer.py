"""What becomes of gradients after the last task of a virtual stage: final, summed over replicas, then over ties."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from rrfp.compute.gradients.shared import SharedGradients
from rrfp.compute.gradients.ties import Pieces, Tie, TiedGradients
from rrfp.compute.program import StageProgram
from rrfp.errors import ProtocolError
from rrfp.model.graph import named
from rrfp.model.tasks import StepId
from rrfp.runtime.context import RankContext, Reduce
from rrfp.runtime.lane_executor import LaneExecutor
from rrfp.transports.base import Channel, Message, MessageKind

#: Sends a message of the step to the rank of a stage; returns when its memory is no longer read.
Send = Callable[[int, Message], Awaitable[None]]

#: Step, tie, and the virtual stage of the copy, or None for the sum.
_Key = tuple[int, str, int | None]


class TiedReduction:
    """One rank's part. All methods are called on the loop."""

    def __init__(self, context: RankContext, gradients: TiedGradients, executor: LaneExecutor, send: Send) -> None:
        self.awaited: list[str] = []
        placement = context.graph.placement
        self._gradients = gradients
        self._topology = context.topology
        self._stage_of = placement.stage_of
        self._executor = executor
        self._activity = context.activity
        self._send = send
        own = frozenset(placement.virtual_stages(context.topology.stage))
        #: Ties with a copy here, in the order of all ranks, and the virtual stages of those copies.
        here = ((tie, own.intersection(tie.virtual_stages)) for tie in gradients.ties)
        self._here = {tie.name: (tie, copies) for tie, copies in here if copies}
        #: Copies here whose virtual stage still has tasks in this step.
        self._unfinished: dict[str, set[int]] = {}
        self._arriving: dict[_Key, _Arriving] = {}

    def open(self) -> None:
        self._unfinished = {name: set(own) for name, (_, own) in self._here.items()}

    async def reduce(self, virtual_stage: int, step: StepId, reduces: bool) -> None:
        """All tasks of ``virtual_stage`` are done: give away its copies' gradients, and wait for the sums.

        A sum is waited for with the last copy of a rank. Where the step does not reduce gradients, only copies of one
        object are added up.
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

    def on_message(self, message: Message) -> None:
        self._activity.touch()
        key, header = self._check(message)
        self._arriving.setdefault(key, _Arriving()).add(header, message)

    async def _lead(self, tie: Tie, step: StepId) -> None:
        """Add up the copies of all ranks, and send the sum."""
        _, own = self._here[tie.name]
        others = [v for v in tie.virtual_stages if v not in own]
        gradients: dict[int, Pieces] = {}
        with self._waits_for(*(f"the gradients of tie {tie.name!r} from stage {self._stage_of(v)}" for v in others)):
            for v in others:
                gradients[v] = await self._arrived((step.number, tie.name, v))
        received = [piece for gradient in gradients.values() for piece in gradient.tensors]
        total = await self._on_lane(tie, partial(self._gradients.add, tie.name, gradients), received)
        del received
        gradients.clear()
        await self._send_pieces(step, tie, None, total, sorted({self._stage_of(v) for v in others}))

    async def _follow(self, tie: Tie, step: StepId) -> None:
        with self._waits_for(f"the sum of tie {tie.name!r} from stage {self._leader(tie)}"):
            total = await self._arrived((step.number, tie.name, None))
        await self._on_lane(tie, partial(self._gradients.put, tie.name, total), total.tensors)

    async def _send_pieces(
        self, step: StepId, tie: Tie, virtual_stage: int | None, gradient: Pieces, stages: Sequence[int]
    ) -> None:
        channel = Channel.FORWARD if virtual_stage is None else Channel.BACKWARD
        pieces: tuple[Tensor | None, ...] = gradient.tensors or (None,)
        header = {
            "tie": tie.name,
            "copy": virtual_stage,
            "layout": gradient.layout,
            "requires_grad": gradient.requires_grad,
            "checksum": gradient.checksum,
        }
        for index, piece in enumerate(pieces):
            body = {**header, "piece": index, "pieces": len(pieces)}
            for stage in stages:
                await self._send(stage, Message(channel, MessageKind.TIE, step, tensors=(piece,), body=body))

    async def _arrived(self, key: _Key) -> Pieces:
        arriving = self._arriving.setdefault(key, _Arriving())
        await arriving.whole.wait()
        del self._arriving[key]
        return arriving.pieces()

    async def _on_lane(self, tie: Tie, call: Callable[[], Any], received: Iterable[Tensor] = ()) -> Any:
        return await self._executor.run_extra(f"the gradients of tie {tie.name!r}", call, received)

    def _leader(self, tie: Tie) -> int:
        return self._stage_of(tie.virtual_stages[0])

    def _leads(self, tie: Tie) -> bool:
        return self._leader(tie) == self._topology.stage

    @contextmanager
    def _waits_for(self, *what: str) -> Iterator[None]:
        self.awaited += what
        try:
            yield
        finally:
            for each in what:
                self.awaited.remove(each)

    def _check(self, message: Message) -> tuple[_Key, Mapping[str, Any]]:
        """Whose gradient a message has; a ProtocolError if it is for another step, rank or copy."""
        header, step, sender = message.body, message.step, message.sender
        match header:
            case {
                "tie": str(name),
                "copy": int() | None as copy,
                "layout": int(),
                "requires_grad": bool(),
                "checksum": int() | None,
                "piece": int(),
            }:
                pass
            case _:
                raise ProtocolError(f"rank {sender} sent gradients of a tie that cannot be read")
        now = self._activity.steps_ended
        if step is None or step.number not in (now, now + 1) or len(message.tensors) != 1:
            raise ProtocolError(
                f"rank {sender} sent gradients of tie {name!r} for {step}; step {now} is next or running"
            )
        tie, _ = self._here.get(name, (None, ()))
        if tie is None or (copy is None) is self._leads(tie) or copy not in (None, *tie.virtual_stages):
            raise ProtocolError(
                f"rank {sender} sent gradients of tie {name!r} that are not for rank {self._topology.rank}"
            )
        if sender != self._topology.rank_of(self._leader(tie) if copy is None else self._stage_of(copy)):
            raise ProtocolError(f"rank {sender} sent gradients of tie {name!r} that are another rank's")
        return (step.number, name, copy), header


class _Arriving:
    """The pieces of one gradient that are here, in any order."""

    def __init__(self) -> None:
        self.whole = asyncio.Event()
        self._header: Mapping[str, Any] = {}
        self._tensors: dict[int, Tensor | None] = {}

    def add(self, header: Mapping[str, Any], message: Message) -> None:
        """Another piece; a ProtocolError if it contradicts those before it."""
        before = {**self._header, "piece": None}
        count, index = header.get("pieces"), header["piece"]
        if not isinstance(count, int) or not 0 <= index < count or index in self._tensors:
            raise ProtocolError(f"rank {message.sender} sent piece {index} of {count} of tie {header['tie']!r}")
        if self._header and before != {**header, "piece": None}:
            raise ProtocolError(
                f"rank {message.sender} sent pieces of tie {header['tie']!r} that contradict each other"
            )
        self._header = header
        (self._tensors[index],) = message.tensors
        if len(self._tensors) == count:
            self.whole.set()

    def pieces(self) -> Pieces:
        ordered = (self._tensors[index] for index in range(len(self._tensors)))
        tensors = tuple(t for t in ordered if t is not None)
        return Pieces(self._header["layout"], self._header["requires_grad"], tensors, self._header["checksum"])


class GradientFinalizer:
    """Makes the gradients of a rank's virtual stages final, one after the other."""

    def __init__(
        self,
        context: RankContext,
        program: StageProgram,
        executor: LaneExecutor,
        send: Send,
        reduce: Reduce | None,
        ties: TiedGradients | None,
    ) -> None:
        self._virtual_stages = context.graph.placement.virtual_stages(context.topology.stage)
        self._text_of = named(context.graph.names)
        self._program = program
        self._finishes = type(program).finish is not StageProgram.finish
        self._executor = executor
        self._reduce = reduce
        self._shared = SharedGradients({}) if ties is None else ties.shared
        self._ties: TiedReduction | None = None
        if ties is not None and ties.ties:
            self._ties = TiedReduction(context, ties, executor, send)
        self._step: StepId | None = None
        self._reduces = True
        #: By virtual stage: its gradients are formed; and, over replicas, summed.
        self._final: dict[int, asyncio.Event] = {}
        self._summed: dict[int, asyncio.Event] = {}

    def awaited(self) -> Iterable[str]:
        """What it waits for from other ranks, one line each."""
        return () if self._ties is None else self._ties.awaited

    def open(self, step: StepId, reduces: bool) -> None:
        """A step begins. ``reduces``: its gradients are summed over replicas and ties."""
        self._step, self._reduces = step, reduces
        self._final = {v: asyncio.Event() for v in self._virtual_stages}
        self._summed = {v: asyncio.Event() for v in self._virtual_stages}
        if self._ties is not None:
            self._ties.open()

    def on_message(self, message: Message) -> None:
        if self._ties is None:
            raise ProtocolError(f"rank {message.sender} sent gradients of a tie, but there are none")
        self._ties.on_message(message)

    @property
    def has_work(self) -> bool:
        """Whether anything follows the last task of a virtual stage."""
        return self._finishes or self._ties is not None or (self._reduce is not None and self._reduces)

    async def finalize(self, virtual_stage: int) -> None:
        """Returns when the gradients of ``virtual_stage`` are what the caller of the step gets.

        Ties that have another copy on this rank may wait for that one.
        """
        name = f"the gradients of {self._text_of(virtual_stage)}"
        if self._finishes:
            await self._executor.run_extra(name, partial(self._program.finish, virtual_stage))
        self._final[virtual_stage].set()
        if self._reduce is not None and self._reduces:
            await self._gather(virtual_stage)
            with self._executor.extra_call(f"the sum over replicas of {name}"):
                await self._reduce(virtual_stage)
            self._summed[virtual_stage].set()
            # What this one lent to those went with their sums, and is no copy's own gradient any more.
            for home in self._shared.homes_of(virtual_stage):
                await self._summed[home].wait()
        if self._ties is not None:
            assert self._step is not None
            await self._ties.reduce(virtual_stage, self._step, self._reduces)

    async def _gather(self, virtual_stage: int) -> None:
        """What several chunks share is summed over replicas once, with the lowest: it needs the others' share first."""
        guests = self._shared.guests_of(virtual_stage)
        for guest in guests:
            await self._final[guest].wait()
        if guests:
            gather = partial(self._shared.gather, virtual_stage)
            await self._executor.run_extra(f"the shared gradients of {self._text_of(virtual_stage)}", gather)
