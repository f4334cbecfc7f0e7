"""The ranks of this process, usually one: as they were built, with all that a session needs, and while they run."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rrfp.compute.gradients.reducer import GradientReducer
from rrfp.compute.gradients.ties import TiedGradients
from rrfp.compute.program import StageProgram
from rrfp.compute.torch_stage import TorchStage
from rrfp.devices.base import Device
from rrfp.errors import ConfigError, PipelineAborted
from rrfp.log import get_logger
from rrfp.model.model_graph import ModelGraph
from rrfp.model.topology import Topology
from rrfp.pipeline.callback_runner import CallbackRunner
from rrfp.pipeline.lost_rank.finishing import Finishing
from rrfp.pipeline.lost_rank.roll_call import Decision
from rrfp.pipeline.method import summary
from rrfp.pipeline.options import Options
from rrfp.runtime.grad_clipping import GradientHolder
from rrfp.runtime.stage_runner import StageRunner
from rrfp.runtime.stall.loop_watchdog import LoopWatchdog
from rrfp.runtime.start.failed_start import FailedStarts
from rrfp.runtime.status_socket import JobReport, StatusServer, chosen_folder
from rrfp.runtime.steps.plan import StepPlanner

logger = get_logger(__name__)

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


class ProcessMonitor:
    """Watches the event loop of a process, and answers `rrfp top`."""

    def __init__(
        self,
        runners: Sequence[StageRunner],
        options: Options,
        title: str,
        give_up: Callable[[PipelineAborted], None] | None,
        stalled: Callable[[str], None],
    ) -> None:
        self._runners = runners
        self._options = options
        self._title = title
        self._give_up = give_up
        self._stalled = stalled
        self._loop_watch: LoopWatchdog | None = None
        self._server: StatusServer | None = None

    def start(self) -> None:
        self._watch_loop()
        self._listen()

    async def close(self) -> None:
        if self._loop_watch is not None:
            await self._loop_watch.close()
        if self._server is not None:
            await self._server.close()

    def _watch_loop(self) -> None:
        """Print the stacks of this process when its loop does not run."""
        options, first, give_up = self._options, self._runners[0], self._give_up

        def end(seconds: float) -> None:
            assert give_up is not None
            give_up(first.stuck(seconds))

        self._loop_watch = LoopWatchdog(
            ", ".join(runner.topology.name for runner in self._runners),
            options.stall_after,
            awake_every=options.patience / 4,  # its process does not look frozen
            watch_lock=options.lock_watch and give_up is not None,
            # On the caller's loop the caller's callbacks may take long, except while a peer waits for a rank.
            matters=lambda: give_up is not None or any(runner.abort.is_awaited for runner in self._runners),
            abort_after=None if give_up is None else options.abort_after,
            give_up=end,
            stalled=self._stalled,
        )
        self._loop_watch.start()

    def _listen(self) -> None:
        """Let `rrfp top` look at the job. A job that cannot be looked at runs on."""
        first = self._runners[0]
        try:
            if (folder := chosen_folder()) is None:
                return
            server = StatusServer(folder, first.job, first.topology.rank, self._report)
            server.start()
        except (OSError, ConfigError) as error:
            logger.info("%s: rrfp top cannot look at this process: %s", first.topology.name, error)
        else:
            self._server = server

    async def _report(self) -> JobReport:
        first = self._runners[0]
        if (failure := first.abort.failure) is not None:
            return JobReport(os.getpid(), self._title, failure=f"aborted by {failure.origin}")
        return JobReport(os.getpid(), self._title, survey=await first.health.query.ask())


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
