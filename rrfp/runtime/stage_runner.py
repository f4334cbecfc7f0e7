"""One rank, from its start to its end, and the calls of its caller: steps, and all-gathers between them.

One TaskGroup holds the receive loop, the arbiter, the watchdog and the sends under way. Everything runs on one loop,
but for the lane. `CoreDriver` runs the tasks of a step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from rrfp import timeouts
from rrfp.arbiter.loop import LoopTime, run_arbiter
from rrfp.compute.activations import tensors_in
from rrfp.compute.async_tensors import inner_tensors
from rrfp.compute.gradients.ties import TiedGradients
from rrfp.compute.lanes.base import Lane
from rrfp.compute.program import StageProgram
from rrfp.core import events as ev
from rrfp.core.stage_core import StageCore
from rrfp.core.usage import Holding, Peaks
from rrfp.devices.base import Device
from rrfp.errors import Origin, OverdueError, PeerLostError, PipelineAborted, RrfpError
from rrfp.log import get_logger
from rrfp.memory.measured import Measured
from rrfp.model.model_graph import ModelGraph
from rrfp.model.tasks import Mode, Task
from rrfp.model.topology import Topology
from rrfp.runtime.abort import AbortController, Failure, advice_for, failure_of
from rrfp.runtime.all_gather import TreeAllGather
from rrfp.runtime.batching import Plan
from rrfp.runtime.context import Observer, RankContext
from rrfp.runtime.core_driver import Coordination, CoreDriver
from rrfp.runtime.grad_finalizer import Reduce
from rrfp.runtime.handshake import StartDigests
from rrfp.runtime.lane_executor import running_here
from rrfp.runtime.messenger import Handler
from rrfp.runtime.reports import ResourceMeter
from rrfp.runtime.result import StepResult
from rrfp.runtime.stall.health_monitor import HealthMonitor
from rrfp.runtime.stall.progress import StallProgress
from rrfp.runtime.stall.status import Survey
from rrfp.runtime.statistics import RankStatistics
from rrfp.runtime.step_report import StepReporter
from rrfp.runtime.trace_saver import TraceRequest, TraceSaver
from rrfp.trace.history import TraceHistory
from rrfp.trace.spans import skips
from rrfp.transports.base import MessageKind, Transport


def explain_shortage(error: BaseException, device: Device | None, holding: Holding) -> BaseException:
    """``error``; if it says that ``device`` has no memory left, with a note on its use and on what the rank holds.

    The task is never run again: its module may have changed something already.
    """
    if device is not None and isinstance(error, torch.OutOfMemoryError):
        memory = device.memory()
        error.add_note(
            f"{device.name} has {memory.allocated:,} bytes in tensors ({memory.peak:,} at most so far) and "
            f"{memory.reserved:,} reserved; of those {holding.num_bytes:,} are counted as held by {holding.held} "
            "microbatches in work (chunk tasks) and by outputs; a smaller limit makes that less (docs/memory.md)"
        )
    return error


class StepRunner:
    """See the module's docstring.

    Attributes:
        earlier: the most that was held in the steps before the current, or last, one.
    """

    def __init__(
        self,
        context: RankContext,
        core: StageCore,
        program: StageProgram,
        driver: CoreDriver,
        reporter: StepReporter,
        history: TraceHistory,
    ) -> None:
        self.earlier = Peaks()
        self._context = context
        self._core = core
        self._program = program
        self._driver = driver
        self._reporter = reporter
        self._history = history
        self._meter = ResourceMeter(core.limit, core.graph.placement.chunks_of(core.stage), context.transport)

    async def run(self, plan: Plan) -> StepResult:
        """Run one step; its program has the batch. The reports of other ranks may be on their way afterwards."""
        context, step, reporter = self._context, plan.step, self._reporter
        await reporter.settle()
        context.activity.begin_step(step, plan.batch.training_step)
        context.departures.check()
        context.recorder.open()
        self.earlier = Peaks.worst([self.earlier, self._core.peaks])
        await self._share_weights(plan)
        self._driver.open_step(plan, reporter.size_correlation)
        reporter.open(plan, self._read_losses)
        await self._driver.finished.wait()
        # Before this rank reports: the others may then begin the next step, and send its tensors.
        context.mailbox.clear()
        trace = context.recorder.close(step.number, self._core.peaks)
        trace = replace(trace, skipped=skips(plan.skipped), sizes=plan.sizes)
        if step.mode is Mode.TRAIN:
            self._history.add(replace(trace, step=plan.batch.training_step))
        losses = await reporter.losses()
        return StepResult.awaiting(
            reporter.report(plan, trace, self._core.peaks, self._meter, self._core.size_correlation),
            step=plan.batch.training_step,
            mode=step.mode,
            microbatches=step.microbatches,
            loss=losses.loss,
            losses=losses.by_microbatch,
            part_losses=losses.by_part,
            trace=trace,
            outputs=self._program.outputs(),
        )

    async def _share_weights(self, plan: Plan) -> None:
        """Sum the weights of losses over replicas; only a rank that computes losses needs the sum."""
        if self._context.topology.summands == 1 or plan.step.mode is not Mode.TRAIN:
            return
        sharing = self._reporter.share_weights(plan)
        if self._reporter.has_losses:
            await sharing
        else:
            self._context.supervisor.spawn(sharing)

    async def _read_losses(self) -> Mapping[str, Mapping[int, float]]:
        """This rank's losses by part, once they are computed."""
        driver = self._driver
        # Where a device computes them reading waits for it, and must not keep the lane from issuing tasks. In virtual
        # time nothing may come between two tasks that the simulator does not know.
        is_last = self._context.lane.device is not None or self._context.time.is_virtual
        await (driver.finished if is_last else driver.outputs_complete).wait()
        return await driver.executor.run_extra("the losses of the step", self._program.losses_by_part)


logger = get_logger(__name__)


class StageRunner:
    """Runs the tasks of one stage. Methods are called on the loop of `start`, unless their docstring names a thread.

    Args:
        core: the stage's state machine.
        program: what the tasks compute.
        lane: where they run; not started.
        transport: the way to the peers; not started.
        topology: where this rank is; by default the only one of its stage.
        coordination: how the ranks of its group agree on an order.
        depth: tasks enqueued and not complete, at most; by default as many as the lane wants, and where a group has a
            leader at least 2, so that its order travels while the task before is running.
        reduce: sums the gradients of a virtual stage over the replicas.
        stall_after: seconds of idleness inside a step after which all ranks are asked why.
        abort_after: seconds that a task, or a turn of a rank's loop, may take before the pipeline ends; None: any.
        ties: the rank's copies of tied parameters, if it may have any; all ranks agree on them.
        trace_steps: the newest training steps whose traces are kept.
        device: the lane's; None for a CPU.
        observer: watches the run.
        model: of the model's parts, if it has any.
        agreement: what ranks agreed on before they connected, compared once they are.
    """

    def __init__(
        self,
        core: StageCore,
        program: StageProgram,
        lane: Lane,
        transport: Transport,
        *,
        topology: Topology | None = None,
        coordination: Coordination = "leader",
        depth: int | None = None,
        reduce: Reduce | None = None,
        stall_after: float = timeouts.STALL_AFTER_S,
        abort_after: float | None = None,
        ties: TiedGradients | None = None,
        trace_steps: int = 0,
        device: Device | None = None,
        observer: Observer | None = None,
        model: ModelGraph | None = None,
        agreement: StartDigests | None = None,
    ) -> None:
        self.topology = topology = Topology(core.stage, core.graph.placement.stages) if topology is None else topology
        self.stage = core.stage
        self.program = program
        self._core = core
        self._abort = AbortController(topology, transport, self._stop, core.graph.text_of)
        self._device = device
        self._agreement = StartDigests() if agreement is None else agreement
        self._context = context = RankContext.create(
            topology, core.graph, transport, lane, self.fail, observer, model, LoopTime.of_running_loop()
        )
        self._driver = driver = CoreDriver(context, core, program, coordination, depth, reduce, ties)
        self._all_gather = TreeAllGather(topology.rank, topology.world, post := driver.messenger.post)
        self._reporter = StepReporter(context, self._all_gather)
        progress = StallProgress(
            context, core, driver.executor, driver.messenger, driver.gradients.awaited, driver.dispute
        )
        self._health = HealthMonitor(context, progress, self._all_gather, post, stall_after, abort_after)
        self._history = TraceHistory(trace_steps)
        self._steps = StepRunner(context, core, program, driver, self._reporter, self._history)
        self._saver = TraceSaver(context, self._all_gather, self._history, driver.executor)
        #: The part that takes each kind of message.
        self._handlers: Mapping[MessageKind, Handler] = {
            **driver.handlers,
            MessageKind.REPORT: self._all_gather.on_message,
            MessageKind.RESULT: self._all_gather.on_message,
            MessageKind.PROBE: self._health.on_message,
            MessageKind.CLOSED: context.departures.on_message,
            MessageKind.ABORT: self._abort.on_message,
        }

    async def start(self) -> None:
        """Connect to the peers, begin to serve, and wait until every rank does, so that any failure can reach all."""
        self._abort.check()
        self._context.lane.start()
        try:
            await self._context.transport.start()
            await self._context.supervisor.start(
                self._driver.messenger.receive_all(self._handlers),
                run_arbiter(self._driver.arbiter, self._context.time.settled),
                *self._health.services(),
            )
        except BaseException:
            self._context.transport.abort()
            self._driver.executor.close()
            raise
        agreements = await self._abort.unless_aborted(self._health.meet(self._agreement), "the start")
        self._agreement.check(agreements)

    async def step(self, plan: Plan) -> StepResult:
        """Run one step; its program has the batch. Cancelling it ends the pipeline.

        Returns:
            The result; the reports of all ranks come later, at the latest before `settle` returns.
        """
        return await self._abort.unless_aborted(self._steps.run(plan), "the step")

    async def settle(self) -> None:
        """Wait for the reports of the last step. A failure before is for `close` to raise."""
        if self._abort.failure is None and not self._reporter.is_settled:
            await self._abort.unless_aborted(self._reporter.settle(), "the end of the step")

    def fence(self) -> None:
        """Let the next step see the work that the calling thread has issued. Called on the caller's thread."""
        self._context.lane.fence()

    def hand_over(self, outputs: Mapping[int, Any]) -> None:
        """Let the calling thread use ``outputs`` of the last virtual stage, if they are this rank's."""
        if self._reporter.has_losses:
            self._context.lane.hand_over(part for tensor in tensors_in(outputs) for part in inner_tensors(tensor))

    async def gather(self, call: str, own: bytes) -> list[bytes]:
        """Give ``own`` to all ranks between two steps, and get what each of them gives, by rank; all equally often.

        ``call`` names the caller's call, which has to be the same on all.
        """
        return await self._abort.unless_aborted(self._gather(call, own), "an all-gather between steps")

    async def save_trace(self, request: TraceRequest) -> str:
        """Write the traces of all ranks into one file, on rank 0; all ranks call it between the same steps."""
        return await self._abort.unless_aborted(self._save_trace(request), "saving a trace")

    async def close(self) -> None:
        """Leave in order: notify the peers, deliver accepted messages, free everything; `RUNNER_CLOSE_S` at most."""
        context = self._context
        if self._abort.is_awaited or not self._reporter.is_settled:  # or a step would wait forever without a trace
            self.fail(RrfpError("the pipeline was left while a step was running"))
        try:
            async with asyncio.timeout(timeouts.RUNNER_CLOSE_S):
                if self._abort.failure is None:
                    self._driver.messenger.leave(context.departures.own_message())
                await context.supervisor.stop()
                await self._abort.close_transport()
        except TimeoutError:
            logger.warning(
                "%s: leaving took more than %g s, because a peer did not take its last messages",
                self.topology.name,
                timeouts.RUNNER_CLOSE_S,
                stage=self.stage,
            )
        finally:
            self._release()
            context.transport.abort()
        self._abort.check_unraised()

    def fail(self, error: BaseException, task: Task | None = None) -> None:
        """End the pipeline on every rank because of ``error`` on this one. Only the first failure counts."""
        self._abort.fail(explain_shortage(error, self._device, self._core.holding), task)

    def check(self) -> None:
        """Raise `PipelineAborted` if it has failed. May be called on any thread."""
        self._abort.check()

    def statistics(self) -> RankStatistics:
        """The memory that it holds, and its traffic. May be called on any thread, at any time."""
        return RankStatistics.of(self.topology, self._core, self._steps.earlier, self._context.transport, self._device)

    async def survey(self) -> Survey:
        """How all ranks are doing, for a user who looks; one at a time."""
        return await self._health.surveys.survey()

    @property
    def job(self) -> str:
        """Names this pipeline among all that run at any time, equal on all its ranks, once it has started."""
        return f"{self._health.process_of(0)!r} {self._context.transport.context.run_id}"

    def measured(self) -> tuple[Measured, ...]:
        """As `StageCore.measured`. Between two calls, on the caller's thread: until the next one nothing changes it."""
        return self._core.measured()

    def restore(self, measured: Sequence[Measured]) -> None:
        """As `StageCore.restore`. Between two calls, on the caller's thread."""
        self._core.restore(measured)

    async def wait_for_failed_process(self, origin: Origin) -> bool:
        """Where a failure began elsewhere, log that, and wait until the process of ``origin`` has ended.

        A lost process has ended already, or is stopped and will not end. Returns whether it was logged.
        """
        rank = origin.stage if origin.rank is None else origin.rank
        why = "; ".join(filter(None, (str(origin), advice_for(origin))))
        return await self._health.let_end(rank, why, is_lost=origin.cause.startswith(f"{PeerLostError.__name__}: "))

    def stuck(self, seconds: float) -> PipelineAborted:
        """The error for the caller when the loop has not run for ``seconds``; the loop itself can do nothing."""
        error = OverdueError(f"its event loop has not run for {seconds:.1f} s, longer than abort_after")
        return failure_of(error, self.topology).error()

    @property
    def has_traces(self) -> bool:
        """Whether the trace of a step is kept. May be read on any thread."""
        return bool(self._history.traces)

    @property
    def failure(self) -> Failure | None:
        """Why the pipeline is aborted, as far as this rank knows; None while it is not. May be read on any thread."""
        return self._abort.failure

    @property
    def is_awaited(self) -> bool:
        """Whether its caller waits for it. May be read on any thread."""
        return self._abort.is_awaited

    def computes_here(self) -> bool:
        """Whether a task is being computed on this thread. May be called on any thread."""
        return (running := running_here()) is not None and running[0] is self._driver.executor

    def _release(self) -> None:
        """Serve nothing more on this rank. May be called twice."""
        self._health.close()
        self._context.supervisor.cancel()
        self._driver.executor.close()

    def _stop(self, failure: Failure) -> None:
        self._reporter.fail(failure)
        self._context.observer.aborted(failure.origin)
        self._release()
        with suppress(BaseException):  # a hint that observes events may raise anything; it is never asked again
            self._core.apply(ev.Aborted(failure.origin))

    # Calls between steps.

    async def _gather(self, call: str, own: bytes) -> list[bytes]:
        await self._reporter.settle()
        with self._context.activity.gather(call) as number:
            self._context.departures.check()
            return await self._all_gather.all_gather(call, number, own)

    async def _save_trace(self, request: TraceRequest) -> str:
        await self._reporter.settle()
        with self._context.activity.gather("save_trace"):
            self._context.departures.check()
            return await self._saver.save(request)
