"""The ranks of this process as they were built, usually one: everything that a session needs to run them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rrfp.compute.gradients.reducer import GradientReducer
from rrfp.compute.gradients.ties import TiedGradients
from rrfp.compute.program import StageProgram
from rrfp.compute.torch_stage import TorchStage
from rrfp.devices.base import Device
from rrfp.model.model_graph import ModelGraph
from rrfp.model.topology import Topology
from rrfp.pipeline.callback_runner import CallbackRunner
from rrfp.pipeline.lost_rank.finishing import Finishing
from rrfp.pipeline.lost_rank.roll_call import Decision
from rrfp.pipeline.method import summary
from rrfp.pipeline.options import Options
from rrfp.runtime.grad_clipping import GradientHolder
from rrfp.runtime.stage_runner import StageRunner
from rrfp.runtime.start.failed_start import FailedStarts
from rrfp.runtime.steps.plan import StepPlanner

T = TypeVar("T")

#: Builds the runners for a run whose first training step has this number; called on the loop on which they will run.
MakeRunners = Callable[[int], Awaitable[Sequence[StageRunner]]]


@dataclass(frozen=True, slots=True, eq=False)
class LocalRanks:
    """See the attributes; those with a default are of a chain with one rank a stage, all in this process."""

    programs: Sequence[StageProgram]
    options: Options
    make_runners: MakeRunners
    topologies: Sequence[Topology] = ()
    #: Checks the arguments of steps.
    planner: StepPlanner = field(default_factory=StepPlanner)
    holder: GradientHolder = field(default_factory=lambda: GradientHolder({}))
    reducers: Sequence[GradientReducer] = ()
    ties: Sequence[TiedGradients] = ()
    devices: Sequence[Device] = ()
    #: V of the whole pipeline; 0: one for each program.
    virtual_stages: int = 0
    callbacks: CallbackRunner = field(default_factory=CallbackRunner)
    #: Of this process's rank, whose start may fail; None where all ranks are in this process.
    failed_starts: FailedStarts | None = None
    #: The name that the caller passed.
    name: str | None = None
    #: With ``on_lost_rank="finish"``.
    finishing: Finishing | None = None
    #: After a loss: this rank among the whole replicas of a decision, from a training step on.
    whole: Callable[[Decision, int], LocalRanks] | None = None

    def __post_init__(self) -> None:
        count = len(self.programs)
        if not self.topologies:
            object.__setattr__(self, "topologies", tuple(Topology(stage, count) for stage in range(count)))
        if not self.virtual_stages:
            object.__setattr__(self, "virtual_stages", count)

    @property
    def model(self) -> ModelGraph | None:
        """Of the model's parts, if it has any."""
        return self.planner.model

    @property
    def are_all(self) -> bool:
        return len(self.topologies) == self.topologies[0].world

    @property
    def is_serial(self) -> bool:
        """Whether their tasks exclude each other: those of torch on a CPU do, see `rrfp.compute.rng`."""
        return len(self.programs) > 1 and not self.devices and any(isinstance(p, TorchStage) for p in self.programs)

    def __str__(self) -> str:
        here = self.topologies[0]
        part = f"{here.stages} stages" if len(self.topologies) > 1 else f"stage {here.stage} of {here.stages}"
        if here.world != here.stages:
            part = f"rank {here.rank} of {here.world} ({part})"
        named = "" if self.name is None else f"{self.name!r}, "
        return f"{named}{part}, {summary(self.options)}"


async def together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Wait for all; when one fails, or this is cancelled, end the others first."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def all_ended(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """Wait for all, also when one fails; then raise the failure of a rank that knows the cause, if there is one."""
    awaitables = list(awaitables)
    if len(awaitables) == 1:  # no task for it
        return [await awaitables[0]]
    outcomes = await asyncio.gather(*awaitables, return_exceptions=True)
    failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if failures:
        raise next((failure for failure in failures if failure.__cause__ is not None), failures[0])
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
