"""One rank, from its start to its end, and the calls of its caller: steps, and all-gathers between them.

One TaskGroup holds the receive loop, the arbiter, the watchdog and the sends under way. Everything runs on one loop,
but for the lane. `CoreDriver` runs the tasks of a step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, replace
from typing import Any

from rrfp import timeouts
from rrfp.arbiter.loop import LoopTime, run_arbiter
from rrfp.compute.lanes.base import Lane
from rrfp.compute.program import StageProgram
from rrfp.core import events as ev
from rrfp.core.stage_core import StageCore
from rrfp.core.usage import Peaks
from rrfp.errors import Origin, OverdueError, PeerLostError, PipelineAborted, RrfpError
from rrfp.log import get_logger
from rrfp.model.tasks import Mode, Task
from rrfp.runtime.abort import AbortController, Failure, advice_for, failure_of
from rrfp.runtime.all_gather import TreeAllGather
from rrfp.runtime.context import RankContext, RankSettings
from rrfp.runtime.core_driver import CoreDriver
from rrfp.runtime.stall.watchdog import Watchdog
from rrfp.runtime.statistics import RankStatistics, explain_shortage
from rrfp.runtime.steps.batch_copies import BatchCopies, CopiedBatch
from rrfp.runtime.steps.deal import Home
from rrfp.runtime.steps.dealer import Dealer, ReplicaExchange
from rrfp.runtime.steps.passed import factors_of
from rrfp.runtime.steps.plan import StepPlan
from rrfp.runtime.steps.result import StepResult
from rrfp.runtime.steps.sharer import ForwardSharer
from rrfp.runtime.steps.step_report import StepReporter
from rrfp.runtime.trace_saver import TraceRequest, TraceSaver
from rrfp.transports.base import MessageKind, Transport

logger = get_logger(__name__)


class StageRunner:
    """Runs the tasks of one stage. Methods are called on its loop, unless their docstring names a thread.

    ``core`` decides what ``program`` computes on ``lane``; ``transport`` is the way to the peers. Neither of these two
    is started.
    """

    def __init__(
        self,
        core: StageCore,
        program: StageProgram,
        lane: Lane,
        transport: Transport,
        settings: RankSettings | None = None,
    ) -> None:
        settings = settings or RankSettings()
        self._context = context = RankContext.create(
            settings, core, lane, transport, self.fail, LoopTime.of_running_loop()
        )
        self.topology = topology = context.topology
        self.core = core
        self._program = program
        #: Its failure, which may be read and raised on any thread.
        self.abort = AbortController(topology, transport, self._stop, self._text_of)
        #: By microbatch of the newest step, whose caller has it; empty where replicas do not share it.
        self._homes: Sequence[Home] = ()
        self._driver = driver = CoreDriver(context, core, program)
        self._all_gather = TreeAllGather(topology.rank, topology.world, driver.messenger.post)
        self._reporter = StepReporter(context, core, self._all_gather, driver.follower)
        #: Where replicas share steps.
        self._exchange: ReplicaExchange | None = None
        if (seeds := settings.replica_seeds) is not None:
            parts = program, seeds, self._all_gather, driver.messenger, driver.executor
            if settings.claims:
                self._exchange = sharer = ForwardSharer(context, core, driver.on_event, driver.follower, *parts)
                driver.add_performers(sharer.performers)
            else:
                self._exchange = Dealer(context, *parts)
            self._reporter.observe = self._exchange.observe
        #: With another replica, of what callers pass.
        self._copies = BatchCopies(context, driver.messenger, driver.executor) if settings.copies else None
        self.health = Watchdog(context, driver, self._all_gather)
        self.saver = TraceSaver(context, self._all_gather, driver.executor)

    async def start(self) -> None:
        """Connect to the peers, begin to serve, and wait until every rank does, so that any failure can reach all."""
        context, driver = self._context, self._driver
        self.abort.check()
        context.lane.start()
        #: The part that takes each kind of message.
        handlers = {
            **driver.handlers,
            **self.health.handlers,
            MessageKind.REPORT: self._all_gather.on_message,
            MessageKind.RESULT: self._all_gather.on_message,
            MessageKind.CLOSED: context.closed_peers.on_message,
            MessageKind.ABORT: self.abort.on_message,
        }
        if self._exchange is not None:
            handlers.update(self._exchange.handlers)
        if self._copies is not None:
            handlers.update(self._copies.handlers)
        try:
            await context.transport.start()
            await context.supervisor.start(
                driver.messenger.receive_all(handlers),
                run_arbiter(driver.arbiter, context.time.settled),
                *self.health.services(),
            )
        except BaseException:
            context.transport.abort()
            driver.executor.close()
            raise
        agreement = context.settings.agreement
        async with self.abort.during("the start"):
            agreements = await self.health.meet(agreement)
            context.save_events.job = self.job
        agreement.check(agreements)

    async def step(self, plan: StepPlan) -> StepResult:
        """Run one step; its program has the batch. Cancelling it ends the pipeline.

        The reports of all ranks come after the result, at the latest before `settle` returns.
        """
        reporter = self._reporter
        async with self.abort.during("the step"):
            await reporter.settle()
            self._context.activity.begin_step(plan.step, plan.batch.training_step)
            self._context.closed_peers.check()
            self._context.recorder.open()
            reporter.begin()
            copies = self._copies if plan.step.mode is Mode.TRAIN else None
            if copies is not None:
                copies.begin(plan)
            plan = await self._shared(plan)
            self._driver.open_step(plan, reporter.size_correlation, reporter.byte_rooms)
            reporter.open(plan, self._read_losses)
            await self._driver.finished.wait()
            if self._exchange is not None:
                await self._exchange.settle()
            if copies is not None:
                await copies.settle()
            return await self._end_step(plan)

    async def _shared(self, plan: StepPlan) -> StepPlan:
        """``plan`` with what replicas tell each other before a step: what each runs, and the sum of all weights."""
        total: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        is_summed = self.topology.summands > 1 and plan.step.mode is Mode.TRAIN
        if is_summed:
            self._context.supervisor.spawn(self._sum_weights(plan, total))
        if self._exchange is not None:
            plan = await self._exchange.share(plan)
            self._context.activity.begin_step(plan.step, plan.batch.training_step)
        self._homes = plan.homes_of(self.topology.replica)
        if is_summed and self._reporter.has_losses:  # other ranks need no sum
            factors_of(plan.batch).normalise(await total)
        return plan

    async def _sum_weights(self, plan: StepPlan, total: asyncio.Future[float]) -> None:
        total.set_result(await self._reporter.share_weights(plan))

    async def _read_losses(self) -> Mapping[str, Mapping[int, float]]:
        """This rank's losses by part, once they are computed."""
        driver = self._driver
        # Where a device computes them reading waits for it, and must not keep the lane from issuing tasks. In virtual
        # time nothing may come between two tasks that the simulator does not know.
        context = self._context
        is_last = context.lane.device is not None or context.time.is_virtual or context.settings.claims
        await (driver.finished if is_last else driver.outputs_complete).wait()
        return await driver.executor.run_extra("the losses of the step", self._program.losses_by_part)

    async def _end_step(self, plan: StepPlan) -> StepResult:
        step, context, deal = plan.step, self._context, plan.deal
        # Before this rank reports: the others may then begin the next step, and send its tensors.
        context.mailbox.clear()
        core_wait = context.lane.core_wait()
        trace = context.recorder.close(step.number, self.core.peaks, plan.visits, plan.sizes, core_wait)
        if self._driver.follower is not None:
            trace = replace(trace, limits={self.core.stage: self.core.view.slots or 0})
        self.saver.keep(plan, trace)
        losses = await self._reporter.losses()
        return StepResult.awaiting(
            self._reporter.report(plan, trace),
            step=plan.batch.training_step,
            mode=step.mode,
            microbatches=plan.given(self.topology.replica),
            loss=losses.loss,
            losses=losses.by_microbatch,
            part_losses=losses.by_part,
            trace=trace,
            outputs=self._program.outputs(),
            dealt=losses.ran if deal is None else deal.counts,
            lost=(),
        )

    async def settle(self) -> None:
        """Wait for the reports of the last step. A failure before is for `close` to raise."""
        if self.abort.failure is None and not self._reporter.is_settled:
            async with self.abort.during("the end of the step"):
                await self._reporter.settle()

    async def gather(self, call: str, own: bytes) -> list[bytes]:
        """Give ``own`` to all ranks between two steps, and get what each of them gives, by rank; all equally often.

        ``call`` names the caller's call, which has to be the same on all.
        """
        async with self.abort.during("an all-gather between steps"):
            await self._reporter.settle()
            with self._context.activity.gather(call) as number:
                self._context.closed_peers.check()
                return await self._all_gather.all_gather(call, number, own)

    async def save_trace(self, request: TraceRequest) -> str:
        """Write the traces of all ranks into one file, on rank 0; all ranks call it between the same steps."""
        async with self.abort.during("saving a trace"):
            await self._reporter.settle()
            with self._context.activity.gather("save_trace"):
                self._context.closed_peers.check()
                return await self.saver.save(request)

    async def close(self) -> None:
        """Leave in order: notify the peers, deliver accepted messages, free everything; `RUNNER_CLOSE_S` at most."""
        context = self._context
        if self.abort.is_awaited or not self._reporter.is_settled:  # or a step would wait forever without a trace
            self.fail(RrfpError("the pipeline was left while a step was running"))
        try:
            async with asyncio.timeout(timeouts.RUNNER_CLOSE_S):
                if self.abort.failure is None:
                    self._driver.messenger.leave(context.closed_peers.own_message())
                await context.supervisor.stop()
                await self.abort.close_transport()
        except TimeoutError:
            logger.warning(
                "%s: leaving took more than %g s, because a peer did not take its last messages",
                self.topology.name,
                timeouts.RUNNER_CLOSE_S,
                stage=self.core.stage,
            )
        finally:
            self._release()
            context.transport.abort()
            if self.abort.failure is None:
                context.save_events.end()
        self.abort.check_unraised()

    async def idle(self) -> None:
        """After `close`: wait until the lane runs no call. Never returns if the lane does not say."""
        while not self._context.lane.is_over:  # noqa: ASYNC110 - the end of a thread is no event
            await asyncio.sleep(timeouts.OVER_S)

    def fail(self, error: BaseException, task: Task | None = None) -> None:
        """End the pipeline on every rank because of ``error`` on this one. Only the first failure counts."""
        self.abort.fail(explain_shortage(error, self._context.settings.device, self.core.holding), task)

    async def wait_for_failed_process(self, origin: Origin) -> bool:
        """Where a failure began elsewhere, log that, and wait for the end of that process; whether it was logged."""
        rank = origin.stage if origin.rank is None else origin.rank
        why = "; ".join(filter(None, (str(origin), advice_for(origin))))
        return await self.health.let_end(rank, why, is_lost=origin.cause.startswith(f"{PeerLostError.__name__}: "))

    # On the caller's thread.

    def fence(self) -> None:
        """Let the next step see the work that the calling thread has issued."""
        self._context.lane.fence()

    def hand_over(self, outputs: Mapping[int, Any]) -> None:
        """Let the calling thread use ``outputs`` of the last virtual stage, if they are this rank's."""
        if self._reporter.has_losses:
            self._driver.executor.hand_over(outputs)

    # On any thread, at any time.

    @property
    def steps_ended(self) -> int:
        """Steps of which this rank has the reports of all ranks."""
        return self._context.activity.steps_ended

    def stuck(self, seconds: float) -> PipelineAborted:
        """The error for the caller when the loop has not run for ``seconds``; the loop itself can do nothing."""
        error = OverdueError(f"its event loop has not run for {seconds:.1f} s, longer than abort_after")
        return failure_of(error, self.topology).error()

    def copied(self, step_number: int) -> CopiedBatch | None:
        """After `close`: the copy that this rank keeps of another replica's batch of a step, if it is whole."""
        return None if self._copies is None else self._copies.held(step_number)

    def has_copied(self, step_number: int) -> bool:
        return self._copies is not None and self._copies.is_held(step_number)

    def batch_written(self) -> str | None:
        """After `close` and `idle`: how a task has changed what the caller passed for the step, if one did."""
        return None if self._copies is None else self._copies.written()

    def computes_here(self) -> bool:
        return self._driver.executor.computes_here()

    def statistics(self) -> RankStatistics:
        topology, last_step, device = self.topology, self.core.peaks, self._context.settings.device
        peaks = Peaks.worst([self._reporter.earlier, last_step])
        moved = self._context.transport.statistics()
        memory = (None, None, None) if device is None else astuple(device.memory())
        return RankStatistics(topology.rank, topology.stage, self.core.holding, last_step, peaks, moved, *memory)

    @property
    def job(self) -> str:
        """Names this pipeline among all that run at any time, equal on all its ranks, once it has started."""
        return f"{self.health.process_of(0)!r} {self._context.transport.context.run_id}"

    def _text_of(self, task: Task) -> str:
        """``task`` for people, with the number that the microbatch's own caller gave it where replicas share a step."""
        text, homes = self.core.graph.text_of(task), self._homes
        return f"{text} (microbatch {homes[task.microbatch]})" if task.microbatch < len(homes) else text

    def _release(self) -> None:
        """Serve nothing more on this rank. May be called twice."""
        self.health.close()
        self._context.supervisor.cancel()
        self._driver.executor.close()

    def _stop(self, failure: Failure) -> None:
        self._reporter.fail(failure)
        self._context.settings.observer.aborted(failure.origin)
        self._release()
        with suppress(BaseException):  # a hint that observes events may raise anything; it is never asked again
            self.core.apply(ev.Aborted(failure.origin))
        # Soon, since the peers are to hear of the failure first.
        asyncio.get_running_loop().call_soon(self._context.save_events, str(failure.origin))
