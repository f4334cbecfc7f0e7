"""The ranks of this process, usually one, which run together on the runtime's loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import nullcontext, suppress
from typing import Any, Literal, TypeVar

from rrfp.arbiter.loop import SettlingLoop
from rrfp.compute.devices.base import Device
from rrfp.compute.gradients.reducer import GradientReducer
from rrfp.compute.gradients.tied import TiedGradients
from rrfp.compute.nondeterminism import check_torch, device_types
from rrfp.compute.program import StageProgram
from rrfp.compute.thread_modes import out_of_reach
from rrfp.core.tasks import Mode
from rrfp.core.topology import Topology
from rrfp.errors import ConfigError, PeerLostError, PipelineAborted
from rrfp.log import get_logger
from rrfp.pipeline.options import Options
from rrfp.runtime.batching import Plan, plan_step
from rrfp.runtime.grad_clipping import Clipping, GradientHolder
from rrfp.runtime.result import StepResult
from rrfp.runtime.stage_runner import StageRunner
from rrfp.runtime.stall.loop_watchdog import LoopWatchdog
from rrfp.runtime.statistics import RankStatistics
from rrfp.runtime.trace_saver import TraceRequest

logger = get_logger(__name__)

T = TypeVar("T")

#: Builds the runners; called on the loop on which they will run.
MakeRunners = Callable[[], Awaitable[Sequence[StageRunner]]]


class LocalRanks:
    """The runners of one process. Methods are called on the runtime's loop, unless their docstring names a thread.

    ``options`` are complete; ``topologies`` are one stage after the other by default.
    """

    def __init__(
        self,
        programs: Sequence[StageProgram],
        options: Options,
        make_runners: MakeRunners,
        *,
        topologies: Sequence[Topology] | None = None,
        holder: GradientHolder | None = None,
        reducers: Sequence[GradientReducer] = (),
        ties: Sequence[TiedGradients] = (),
        devices: Sequence[Device] = (),
    ) -> None:
        self._programs = programs
        in_order = [Topology(stage, len(programs)) for stage in range(len(programs))]
        self._topologies = in_order if topologies is None else topologies
        self._options = options
        self._make_runners = make_runners
        self._holder = GradientHolder({}) if holder is None else holder
        self._reducers = reducers
        self._ties = ties
        self._devices = devices
        self._runners: Sequence[StageRunner] = ()
        self._has_warned = False
        self._loop_watch: LoopWatchdog | None = None

    @property
    def first_step(self) -> int:
        """The number of the first training step."""
        return self._options["first_step"]

    def announce(self) -> None:
        """Read the tied parameters, which ranks compare, and check torch's settings if the pipeline is deterministic.

        Called on the caller's thread, whose settings apply.

        Raises:
            ConfigError: if they are not, where they have to be.
        """
        for tied in self._ties:
            tied.read()
        if self._options["deterministic"]:
            kinds = {device.kind for device in self._devices if device.kind == "cuda"}
            check_torch(device_types(self._holder.modules.values()) | kinds)

    def plan(self, number: int, training_step: int, mode: Mode, **arguments: Any) -> Plan:
        """Check a step's arguments and pass them to the programs. Called on the caller's thread, whose modes apply.

        Args:
            number: the step's, counting evaluations.
            training_step: training steps before it, counting those before ``first_step``.
            mode: training or forward only.
            arguments: those of `rrfp.Pipeline.step`; if they do not fit, a ConfigError says so and nothing has changed.
        """
        topology = self._topologies[0]
        known: Any = {
            "training_step": training_step,
            "stages": topology.stages,
            "is_shared": topology.replicas > 1,
        }
        plan = plan_step(number, mode, self._options["reduction"], **arguments, **known)
        self._warn_about_modes()
        for program, topology in zip(self._programs, self._topologies, strict=True):
            program.open(plan.step, plan.batch_of(topology.stage))
        if mode is Mode.TRAIN:
            for tied in self._ties:
                tied.open()
            for reducer in self._reducers:
                reducer.open(plan.reduce_gradients)
        for runner in self._runners:  # last, because all of the above may have issued work
            runner.fence()
        return plan

    def _warn_about_modes(self) -> None:
        """Warn once about modes of the caller's thread that do not act on tasks."""
        if not self._has_warned and (modes := out_of_reach()) is not None:
            logger.warning("around step or evaluate, %s (docs/profiling.md)", modes)
            self._has_warned = True

    async def start(self, give_up: Callable[[PipelineAborted], None] | None = None) -> None:
        """Connect and begin to serve; when one rank cannot, free the others' resources.

        ``give_up`` is called on another thread with the failure when the runtime's own loop has not run for
        ``abort_after`` seconds; None on the caller's loop.
        """
        for reducer in self._reducers:
            reducer.start()
        try:
            self._runners = await self._make_runners()
            await together(runner.start() for runner in self._runners)
            self._watch_loop(give_up)
        except BaseException as error:
            self.fail(error)
            await self.close(quiet=True)
            raise

    async def step(self, plan: Plan) -> StepResult:
        """Run one planned step on all ranks of this process; the reports of all ranks may still be on their way."""
        first, *others = await _all(runner.step(plan) for runner in self._runners)
        return first.joined(others) if others else first

    async def whole_step(self, plan: Plan) -> StepResult:
        """As `step`, and wait for the reports."""
        result = await self.step(plan)
        await self.settle()
        return result

    async def settle(self) -> None:
        """As `StageRunner.settle`, on all ranks of this process."""
        await _all(runner.settle() for runner in self._runners)

    def hand_over(self, result: StepResult) -> None:
        """Let the calling thread use the tensors of ``result``. Called on the caller's thread."""
        for runner in self._runners:
            runner.hand_over(result.outputs)

    def clipping(self, max_norm: float, norm_type: float) -> Clipping:
        """Begin to clip gradients. Called on the caller's thread; errors as in `Clipping`."""
        return Clipping(self._holder, max_norm, norm_type)

    async def share(self, clipping: Clipping) -> list[bytes]:
        """All-gather the shares of all processes; the first rank of this process contributes its share."""
        first, *others = self._runners
        shares = [first.gather(clipping.share()), *(runner.gather(clipping.empty_share()) for runner in others)]
        return (await _all(shares))[0]

    def trace_request(
        self, path: str | os.PathLike[str], steps: int | None, replica: int | Literal["all"]
    ) -> TraceRequest:
        """Check the arguments of ``save_trace``. Called on the caller's thread.

        Raises:
            ConfigError: if one is impossible, or no step is kept.
        """
        replicas = self._topologies[0].replicas
        text: Any = os.fspath(path) if isinstance(path, os.PathLike) else path
        if type(text) is not str or not text:
            raise ConfigError(f"path is {path!r}, must be the name of a file")
        if steps is not None and (type(steps) is not int or steps < 1):
            raise ConfigError(f"steps is {steps!r}, must be an integer >= 1, or None for all that are kept")
        if replica != "all" and (type(replica) is not int or not 0 <= replica < replicas):
            raise ConfigError(f"replica is {replica!r}, must be one of 0..{replicas - 1}, or 'all'")
        if not self._options["trace_steps"]:
            raise ConfigError("trace_steps is 0, must be at least 1 for save_trace")
        if not all(runner.has_traces for runner in self._runners):
            raise ConfigError("no training step is recorded: save_trace goes after a step")
        return TraceRequest(text, steps, None if replica == "all" else replica)

    async def save_trace(self, request: TraceRequest) -> str:
        """As `StageRunner.save_trace`, on all ranks of this process."""
        return (await _all(runner.save_trace(request) for runner in self._runners))[0]

    def statistics(self) -> tuple[RankStatistics, ...]:
        """The statistics of each rank; none before the start. May be called on any thread."""
        return tuple(runner.statistics() for runner in self._runners)

    def computes_here(self) -> bool:
        """Whether a task of one of the ranks is being computed on this thread. May be called on any thread."""
        return any(runner.computes_here() for runner in self._runners)

    def fail(self, error: BaseException) -> None:
        """End the pipeline because of ``error`` in the caller's code; no effect on a rank that has failed already."""
        for runner in self._runners:
            runner.fail(error)

    async def close(self, *, quiet: bool = False) -> None:
        """Leave in order, or after a failure once the peers have the abort.

        Raises `PipelineAborted` if the pipeline failed and no call has raised it, unless ``quiet``: the caller knows.
        """
        # A rank whose own call had returned when another one failed has raised nothing; the caller knows all the same.
        quiet = quiet or any(runner.has_raised for runner in self._runners)
        try:
            with suppress(PipelineAborted) if quiet else nullcontext():
                await _all(runner.close() for runner in self._runners)
        finally:
            if self._loop_watch is not None:
                self._loop_watch.close()
            for reducer in self._reducers:
                reducer.close()

    async def let_culprit_end(self, error: PipelineAborted) -> None:
        """Under torchrun, wait until the process in which ``error`` began has ended; `CULPRIT_GRACE_S` at most.

        torchrun takes the first process that it finds ended as the root cause, and ends the others. A lost process has
        ended already, or is stopped and will not end.
        """
        is_lost = error.origin.cause.startswith(f"{PeerLostError.__name__}: ")
        if "TORCHELASTIC_RUN_ID" in os.environ and not is_lost:
            await asyncio.gather(*(runner.let_culprit_end(error.origin) for runner in self._runners))

    def _watch_loop(self, give_up: Callable[[PipelineAborted], None] | None) -> None:
        """Print the stacks of this process when its loop does not run."""
        if isinstance(asyncio.get_running_loop(), SettlingLoop):  # virtual time is not related to real time
            return
        options, first = self._options, self._runners[0]

        def end(seconds: float) -> None:
            assert give_up is not None
            give_up(first.stuck(seconds))

        self._loop_watch = LoopWatchdog(
            ", ".join(runner.topology.name for runner in self._runners),
            options["stall_after"],
            use_timer=options["stack_timer"] and give_up is not None,
            # On the caller's loop the caller's callbacks may take long, except while a peer waits for a rank.
            matters=lambda: give_up is not None or any(runner.is_awaited for runner in self._runners),
            abort_after=None if give_up is None else options["abort_after"],
            give_up=end,
        )
        self._loop_watch.start()


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


async def _all(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """Wait for all, also when one fails; then raise the failure of a rank that knows the cause, if there is one."""
    awaitables = list(awaitables)
    if len(awaitables) == 1:  # no task for it
        return [await awaitables[0]]
    outcomes = await asyncio.gather(*awaitables, return_exceptions=True)
    failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if failures:
        raise next((failure for failure in failures if failure.__cause__ is not None), failures[0])
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
