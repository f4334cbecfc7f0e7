"""What becomes of gradients after the last task of a virtual stage: final, summed over replicas, then over ties."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

from rrfp.compute.gradients.shared import SharedGradients
from rrfp.compute.gradients.tied import TiedGradients
from rrfp.compute.program import StageProgram
from rrfp.core.tasks import StepId
from rrfp.errors import ProtocolError
from rrfp.graphs.names import named
from rrfp.runtime.context import RankContext
from rrfp.runtime.lane_executor import LaneExecutor
from rrfp.runtime.tied_reduction import Send, TiedReduction
from rrfp.transports.base import Message

#: Sums the gradients of a virtual stage over the replicas.
Reduce = Callable[[int], Awaitable[None]]


class GradientFinalizer:
    """See the module's docstring. ``ties`` has the rank's copies of tied parameters, if it may have any."""

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
        """A TIE message arrived."""
        if self._ties is None:
            raise ProtocolError(f"rank {message.sender} sent gradients of a tie, but there are none")
        self._ties.on_message(message)

    async def finalize(self, virtual_stage: int) -> None:
        """Returns when the gradients of ``virtual_stage`` are what the caller of the step gets.

        Ties that have another copy on this rank may wait for that one.
        """
        name = f"the gradients of {self._text_of(virtual_stage)}"
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
