"""The ranks of this process, usually one, which run together on the runtime's loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import nullcontext, suppress
from typing import Any, Literal, TypeVar
from weakref import WeakSet

from rrfp.arbiter.loop import LoopTime
from rrfp.compute.caller_context import out_of_reach
from rrfp.compute.determinism import check_torch, device_types
from rrfp.compute.gradients.reducer import GradientReducer
from rrfp.compute.gradients.ties import TiedGradients
from rrfp.compute.program import StageProgram
from rrfp.compute.tracebacks import print_no_traceback
from rrfp.devices.base import Device
from rrfp.errors import ConfigError, PipelineAborted, RrfpError
from rrfp.log import get_logger
from rrfp.model.model_graph import ModelGraph
from rrfp.model.tasks import Mode
from rrfp.model.topology import Topology
from rrfp.pipeline.delivery import Delivery
from rrfp.pipeline.method import summary
from rrfp.pipeline.options import Options
from rrfp.pipeline.process_monitor import ProcessMonitor
from rrfp.pipeline.state import PipelineState
from rrfp.runtime.batching import Plan, plan_step
from rrfp.runtime.failed_start import FailedStarts
from rrfp.runtime.grad_clipping import GradientHolder
from rrfp.runtime.lane_executor import running_here
from rrfp.runtime.result import StepResult
from rrfp.runtime.stage_runner import StageRunner
from rrfp.runtime.statistics import RankStatistics
from rrfp.runtime.trace_saver import TraceRequest

T = TypeVar("T")


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


logger = get_logger(__name__)

#: Builds the runners; called on the loop on which they will run.
MakeRunners = Callable[[], Awaitable[Sequence[StageRunner]]]


#: Those of this process that were started: `LocalRanks.check_outside` names the one that computes.
_started: WeakSet[LocalRanks] = WeakSet()


class LocalRanks:
    """The runners of one process. Methods are called on the runtime's loop, unless their docstring names a thread.

    ``options`` are complete; ``topologies`` are one stage after the other by default. ``virtual_stages`` is V of
    the whole pipeline; by default one for each program. ``model`` is of the model's parts, if it has any.
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
        virtual_stages: int | None = None,
        model: ModelGraph | None = None,
        delivery: Delivery | None = None,
        failed_starts: FailedStarts | None = None,
    ) -> None:
        self._programs = programs
        in_order = [Topology(stage, len(programs)) for stage in range(len(programs))]
        self._topologies = in_order if topologies is None else topologies
        self._options = options
        self._make_runners = make_runners
        #: The gradients of this process.
        self.holder = GradientHolder({}) if holder is None else holder
        self._reducers = reducers
        self._ties = ties
        self._devices = devices
        self._virtual_stages = len(programs) if virtual_stages is None else virtual_stages
        self._model = model
        #: Notifies the callbacks.
        self.delivery = Delivery() if delivery is None else delivery
        #: The name that its caller passed.
        self.name: str | None = None
        self._failed_starts = failed_starts
        #: A state that was loaded before the start.
        self._loaded: PipelineState | None = None
        self._runners: Sequence[StageRunner] = ()
        self._has_warned = False
        self._onlookers: ProcessMonitor | None = None
        self._time = LoopTime()

    @property
    def first_step(self) -> int:
        """The number of the first training step."""
        return self._options["first_step"]

    def __str__(self) -> str:
        """Their stages and method. May be called on any thread."""
        here = self._topologies[0]
        part = f"{here.stages} stages" if len(self._topologies) > 1 else f"stage {here.stage} of {here.stages}"
        if here.world != here.stages:
            part = f"rank {here.rank} of {here.world} ({part})"
        named = "" if self.name is None else f"{self.name!r}, "
        return f"{named}{part}, {summary(self._options)}"

    def state(self, step: int) -> PipelineState:
        """The state after ``step`` training steps, between two calls. Called on the caller's thread."""
        measured = [each for runner in self._runners for each in runner.measured()]
        if not self._runners and self._loaded is not None:
            measured = list(self._loaded.measured)
        names = () if self._model is None else self._model.tasks.names
        return PipelineState.of(self._options, self._topologies[0], self._virtual_stages, step, measured, names)

    def load(self, state: PipelineState) -> None:
        """Go on from ``state``, between two calls. Called on the caller's thread.

        Raises:
            ConfigError: if it does not fit.
        """
        own = self.state(state.step)
        chosen = self.first_step if self._loaded is None and not self._runners else 0
        if chosen not in (0, state.step):
            raise ConfigError(f"first_step is {chosen}, must be {state.step}, the state's step, or not passed")
        state.check_fits(own)
        self._loaded = state.for_pipeline(own)
        if not self._runners:  # the ranks compare it when they enter
            self._options["first_step"] = state.step
        self._restore()

    def _restore(self) -> None:
        if self._loaded is not None:
            for runner in self._runners:
                runner.restore(self._loaded.measured)

    def announce(self) -> None:
        """Read the tied parameters, which ranks compare, and check torch's settings if the pipeline is deterministic.

        Called on the caller's thread, whose settings apply.
        """
        try:
            for tied in self._ties:
                tied.read()
            if self._options["deterministic"]:
                kinds = {device.kind for device in self._devices if device.kind == "cuda"}
                check_torch(device_types(self.holder.modules.values()) | kinds)
        except Exception as error:
            if self._failed_starts is not None:
                self._failed_starts.report_now(error)
            raise

    def plan(self, number: int, training_step: int, mode: Mode, **arguments: Any) -> Plan:
        """Check a step's arguments and pass them to the programs. Called on the caller's thread, whose modes apply.

        Args:
            number: the step's, counting evaluations.
            training_step: training steps before it, counting those before ``first_step``.
            mode: training or forward only.
            arguments: those of `rrfp.Pipeline.step`; if they do not fit, a ConfigError says so and nothing has changed.
        """
        topology = self._topologies[0]
        is_shared = topology.summands > 1
        known: Any = {"training_step": training_step, "stages": topology.stages, "graph": self._model}
        known["is_shared"] = is_shared
        plan = plan_step(number, mode, self._options["reduction"], **arguments, **known)
        if mode is Mode.TRAIN:
            for tied in self._ties:
                tied.check()
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
        self._time = LoopTime.of_running_loop()
        for reducer in self._reducers:
            reducer.start()
        connecting = self._connect()
        try:
            await (connecting if self._failed_starts is None else self._failed_starts.unless_reported(connecting))
            if not self._time.is_virtual:  # which is not related to the time of other threads and processes
                self._onlookers = ProcessMonitor(
                    self._runners, self._options, str(self), give_up, self.delivery.stalled
                )
                self._onlookers.start()
        except BaseException as error:
            self.fail(error)
            await self.close(quiet=True)
            raise

    async def delivered(self) -> None:
        """Wait until all callbacks have had their events, without blocking the loop unless its time is virtual."""
        if self._time.is_virtual:
            self.delivery.wait()
        else:
            await self.delivery.delivered()

    async def _connect(self) -> None:
        self._runners = await self._make_runners()
        _started.add(self)
        self._restore()
        await together(runner.start() for runner in self._runners)

    async def step(self, plan: Plan) -> StepResult:
        """Run one planned step on all ranks of this process; the reports of all ranks may still be on their way."""
        first, *others = await all_ended(runner.step(plan) for runner in self._runners)
        return first.joined(others) if others else first

    async def whole_step(self, plan: Plan) -> StepResult:
        """As `step`, and wait for the reports."""
        result = await self.step(plan)
        await self.settle()
        return result

    async def settle(self) -> None:
        """As `StageRunner.settle`, on all ranks of this process."""
        await all_ended(runner.settle() for runner in self._runners)

    def hand_over(self, result: StepResult) -> None:
        """Let the calling thread use the tensors of ``result``. Called on the caller's thread."""
        for runner in self._runners:
            runner.hand_over(result.outputs)

    @property
    def are_all(self) -> bool:
        """Whether these are all ranks of the job."""
        return len(self._topologies) == self._topologies[0].world

    async def gather(self, call: str, own: bytes, empty: bytes) -> list[bytes]:
        """All-gather ``own`` of each process between two steps; further ranks of a process give ``empty``."""
        first, *others = self._runners
        return (await all_ended([first.gather(call, own), *(runner.gather(call, empty) for runner in others)]))[0]

    def trace_request(
        self, path: str | os.PathLike[str], steps: int | None, replica: int | Literal["all"]
    ) -> TraceRequest:
        """Check the arguments of ``save_trace``. Called on the caller's thread."""
        request = TraceRequest.checked(path, steps, replica, self._topologies[0].replicas)
        if not self._options["trace_steps"]:
            raise ConfigError("trace_steps is 0, must be at least 1 for save_trace")
        if not all(runner.has_traces for runner in self._runners):
            raise ConfigError("no training step is recorded: save_trace goes after a step")
        return request

    async def save_trace(self, request: TraceRequest) -> str:
        """As `StageRunner.save_trace`, on all ranks of this process."""
        return (await all_ended(runner.save_trace(request) for runner in self._runners))[0]

    def check(self) -> None:
        """As `StageRunner.check`, on all ranks of this process. May be called on any thread."""
        for runner in self._runners:
            runner.check()

    def statistics(self) -> tuple[RankStatistics, ...]:
        """The statistics of each rank; none before the start. May be called on any thread."""
        return tuple(runner.statistics() for runner in self._runners)

    def computes_here(self) -> bool:
        """Whether a task of one of the ranks is being computed on this thread. May be called on any thread."""
        return any(runner.computes_here() for runner in self._runners)

    def check_outside(self) -> None:
        """Raise an RrfpError if the calling thread computes a task, of this or another pipeline of the process."""
        if (running := running_here()) is None:
            return
        # The task could not go on before the call returns, and torch's one random generator is the task's until then.
        _, task = running
        other = next((ranks for ranks in list(_started) if ranks.computes_here()), None)
        whose = "its own" if other is self else "another pipeline" if other is None else f"another pipeline ({other})"
        raise RrfpError(
            f"this pipeline ({self}) was called inside task {task} of {whose}: modules, loss_fn and hooks cannot "
            "call a pipeline of their process; call it before the step, and pass its result as a target or an input"
        )

    @property
    def has_failed(self) -> bool:
        """Whether the pipeline is aborted on one of the ranks. May be read on any thread."""
        return any(runner.failure is not None for runner in self._runners)

    def fail(self, error: BaseException) -> None:
        """End the pipeline because of ``error`` in the caller's code; no effect on a rank that has failed already."""
        for runner in self._runners:
            runner.fail(error)

    async def close(self, *, quiet: bool = False) -> None:
        """Leave in order, or after a failure once the peers have the abort.

        Raises `PipelineAborted` if the pipeline failed and no call has raised it, unless ``quiet``: the caller knows.
        """
        # A rank whose own call had returned when another one failed has raised nothing; the caller knows all the same.
        quiet = quiet or any(runner.failure is not None and runner.failure.was_raised for runner in self._runners)
        try:
            with suppress(PipelineAborted) if quiet else nullcontext():
                await all_ended(runner.close() for runner in self._runners)
        finally:
            if self._onlookers is not None:
                await self._onlookers.close()
            for reducer in self._reducers:
                reducer.close()

    async def wait_for_failed_process(self, error: PipelineAborted) -> None:
        """Under torchrun, wait until the process in which ``error`` began has ended; `FAILED_PROCESS_GRACE_S` at most.

        torchrun takes the first process that it finds ended as the root cause, and ends the others. A rank that is not
        at fault says so in one line: its traceback would only bury that of the rank at fault.
        """
        if "TORCHELASTIC_RUN_ID" in os.environ:
            logged = await asyncio.gather(*(runner.wait_for_failed_process(error.origin) for runner in self._runners))
            if all(logged):
                print_no_traceback(error)
