"""The shell of one rank: turns I/O into events for the core, and the core's instructions into I/O.

One TaskGroup holds the receive pump, the arbiter, the watchdog and the sends under way. There is no policy and no wire
format in here. Everything runs on one loop, but for what is handed to the lane.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Literal

from rrfp.arbiter.agreement import AgreementArbiter
from rrfp.arbiter.arbiter import Arbiter
from rrfp.arbiter.group_messages import GroupMessage
from rrfp.arbiter.leader import LeaderProtocol
from rrfp.arbiter.loop import SettlingLoop, run_arbiter
from rrfp.compute.gradients.tied import TiedGradients
from rrfp.compute.mailbox import Mailbox
from rrfp.compute.program import Lane, StageProgram
from rrfp.compute.weighting import Reduction
from rrfp.core import events as ev
from rrfp.core import timeouts
from rrfp.core.order_log import Group
from rrfp.core.stage_core import StageCore
from rrfp.core.tasks import Mode, Task
from rrfp.core.topology import Topology
from rrfp.core.usage import Peaks, WaitCause
from rrfp.errors import Origin, OverdueError, PipelineAborted, ProtocolError, RrfpError
from rrfp.log import get_logger
from rrfp.runtime.abort import Lifeline
from rrfp.runtime.all_gather import TreeExchange
from rrfp.runtime.batching import Plan
from rrfp.runtime.departures import closed_message
from rrfp.runtime.failure import Failure, failure_of
from rrfp.runtime.gathering import Gathering
from rrfp.runtime.grad_finalizer import GradientEnd, Reduce
from rrfp.runtime.lane_executor import LaneWork
from rrfp.runtime.messenger import Courier
from rrfp.runtime.reception import Reception
from rrfp.runtime.result import StepResult
from rrfp.runtime.stall.progress import Progress
from rrfp.runtime.stall.supervision import Supervision
from rrfp.runtime.statistics import RankStatistics
from rrfp.runtime.step_report import Accounts
from rrfp.runtime.supervisor import Services
from rrfp.trace.recorder import Recorder
from rrfp.transports.base import Transport

logger = get_logger(__name__)

#: How the ranks of a group come to one order: a leader's, or by proposing until they agree (the paper's way).
Coordination = Literal["leader", "agreement"]


class StageRunner:
    """Runs the tasks of one stage. All methods are called on the loop of `start`.

    Args:
        core: the stage's state machine.
        program: what the tasks compute.
        lane: where they run; not started.
        transport: the way to the peers; not started.
        place: where this rank is; by default the only one of its stage.
        coordination: how the ranks of its group come to one order.
        depth: tasks enqueued and not complete, at most; by default as many as the lane wants, and where a group has a
            leader at least 2, so that its order travels while the task before is running.
        reduce: sums the gradients of a virtual stage over the replicas.
        stall_after: seconds of idleness inside a step after which all ranks are asked why.
        abort_after: seconds that a task, or a turn of a rank's loop, may take before the pipeline ends; None: any.
        ties: the rank's copies of tied parameters, if it may have any; all ranks agree on them.
    """

    def __init__(
        self,
        core: StageCore,
        program: StageProgram,
        lane: Lane,
        transport: Transport,
        *,
        place: Topology | None = None,
        coordination: Coordination = "leader",
        depth: int | None = None,
        reduce: Reduce | None = None,
        stall_after: float = timeouts.STALL_AFTER_S,
        abort_after: float | None = None,
        ties: TiedGradients | None = None,
    ) -> None:
        self.place = place = Topology(core.stage, core.graph.placement.stages) if place is None else place
        self.stage = core.stage
        self.program = program
        self._core = core
        self._lane = lane
        self._transport = transport
        self._mailbox = Mailbox(core.graph, core.stage)
        self._recorder = Recorder(core.stage, lane.now)
        self._progress = Progress(core, place, lane.now)
        self._life = Lifeline(place, transport, self._stop)
        self._services = Services(self.fail)
        self._work = LaneWork(program, lane, self._mailbox, self._progress, self._recorder, self._completed, self.fail)
        self._courier = Courier(
            place, transport, self._mailbox, self._progress, self._recorder, self._services, self._tell
        )
        self._exchange = TreeExchange(place.rank, place.world, self._courier.post)
        self._supervision = Supervision(
            place,
            transport.context.peers,
            self._progress,
            self._exchange,
            self._courier,
            lane.stack,
            self.fail,
            stall_after,
            abort_after,
        )
        self._gathering = Gathering(self._exchange, self._courier.departures, self._progress)
        self._accounts = Accounts(place, core.graph, self._exchange)
        self._gradients = GradientEnd(
            core.graph.placement, place, program, self._work, self._progress, self._courier.send_to, reduce, ties
        )
        hear, tie = self._join_group(coordination, depth), self._gradients.hear
        watchdog, abort = self._supervision.watchdog, self._life.abort
        self._inbox = Reception(place, self._courier, self._exchange, watchdog, self._progress, hear, abort, tie)
        self._finished = asyncio.Event()
        #: The most that was held in the steps before this one.
        self._earlier = Peaks()

    def _join_group(self, coordination: Coordination, depth: int | None) -> Callable[[int, GroupMessage], None] | None:
        """Make the arbiter, and what this rank needs to run one order with its group."""
        self._leader_protocol: LeaderProtocol | None = None
        self._agreement: AgreementArbiter | None = None
        core, place = self._core, self.place
        if place.members == 1:
            self._arbiter = Arbiter(core, depth or self._lane.depth, self._dispatch, self._waiting)
            return None
        group = Group(place.member, place.members)
        if coordination == "leader":
            self._arbiter = Arbiter(core, depth or max(2, self._lane.depth), self._dispatch, self._waiting)
            self._leader_protocol = LeaderProtocol(
                group, self._courier.send_to_member, self._tell, reports_bytes=core.limit.bytes is not None
            )
            return self._leader_protocol.on_message
        self._arbiter = self._agreement = AgreementArbiter(
            core,
            depth or self._lane.depth,
            self._dispatch,
            self._waiting,
            group=group,
            send=self._courier.send_to_member,
        )
        self._progress.dispute = lambda: None if self._agreement is None else self._agreement.dispute
        return self._agreement.on_message

    # Life.

    async def start(self) -> None:
        """Connect to the peers, begin to serve, and wait until every rank does, so that any failure can reach all.

        Raises:
            TransportError: if a peer does not come.
            PipelineAborted: if another rank failed to start.
        """
        self._life.check()
        self._lane.start()
        settled = loop.settled if isinstance(loop := asyncio.get_running_loop(), SettlingLoop) else None
        try:
            await self._transport.start()
            await self._services.start(
                self._courier.pump(self._inbox.take),
                run_arbiter(self._arbiter, settled),
                *self._supervision.services(),
            )
        except BaseException:
            self._transport.abort()
            self._work.close()
            raise
        await self._life.unless_aborted(self._supervision.meet(), "the start")

    async def step(self, plan: Plan, reduction: Reduction = "mean") -> StepResult:
        """Run one step whose batch the program was given. Cancelling it ends the pipeline.

        Args:
            plan: the step.
            reduction: how the losses of its microbatches combine: ``"mean"`` or ``"sum"``.

        Raises:
            PipelineAborted: if any rank failed.
        """
        return await self._life.unless_aborted(self._run_step(plan, reduction), "the step")

    async def gather(self, own: bytes) -> list[bytes]:
        """Give ``own`` to all ranks between two steps, and hear what each of them gives, by rank; all equally often."""
        return await self._life.unless_aborted(self._gathering.gather(own), "an exchange between steps")

    async def close(self) -> None:
        """Leave in order: tell the peers, deliver what was accepted, free everything. Takes `RUNNER_CLOSE_S` at most.

        Raises:
            PipelineAborted: if the pipeline failed and no call has told the caller.
        """
        if self._life.is_awaited:  # or the step would wait for ever, and without a word
            self.fail(RrfpError("the pipeline was left while a step was running"))
        try:
            async with asyncio.timeout(timeouts.RUNNER_CLOSE_S):
                if self._life.failure is None:
                    closed = closed_message(self._progress.steps_ended, self._progress.gatherings_ended)
                    for peer in self._transport.context.peers:
                        self._courier.post(peer, closed)
                await self._services.stop()
                await self._life.end()
        except TimeoutError:
            logger.warning(
                "%s: the peers took more than %g s to let it go",
                self.place.name,
                timeouts.RUNNER_CLOSE_S,
                stage=self.stage,
            )
        finally:
            self._supervision.close()
            self._services.cancel()
            self._transport.abort()
            self._work.close()
        self._life.tell()

    def fail(self, error: BaseException, task: Task | None = None) -> None:
        """End the pipeline on every rank because of ``error`` on this one. Only the first failure counts."""
        self._life.fail(error, task)

    def statistics(self) -> RankStatistics:
        """What it holds and has moved. May be called on any thread, at any time."""
        return RankStatistics.of(self.place, self._core, self._earlier, self._transport)

    async def let_culprit_end(self, origin: Origin) -> None:
        """Where a failure began elsewhere, say so, and wait until the process of ``origin`` has ended."""
        await self._supervision.let_end(origin.stage if origin.rank is None else origin.rank, str(origin))

    def stuck(self, seconds: float) -> PipelineAborted:
        """What the caller is told when the loop has not run for ``seconds``; the loop itself can do nothing."""
        error = OverdueError(f"its event loop has not run for {seconds:.1f} s, longer than abort_after")
        return failure_of(error, self.place).error()

    @property
    def is_awaited(self) -> bool:
        """Whether its caller waits for it. May be asked on any thread."""
        return self._life.is_awaited

    def computes_here(self) -> bool:
        """Whether a task is being computed on this thread. May be called on any thread."""
        return self._work.thread == threading.get_ident()

    def _stop(self, failure: Failure) -> None:
        self._supervision.close()
        self._services.cancel()
        self._work.close()
        with suppress(Exception):  # a hint that observes events may raise; it is never asked again
            self._core.apply(ev.Aborted(failure.origin))

    # A step.

    async def _run_step(self, plan: Plan, reduction: Reduction) -> StepResult:
        step = plan.step
        self._courier.departures.check(step.number)
        self._finished.clear()
        self._progress.open(step)
        self._recorder.open()
        self._earlier = Peaks.worst([self._earlier, self._core.peaks])
        if self.place.replicas > 1 and step.mode is Mode.TRAIN:
            sharing = self._accounts.share_weights(plan)
            if self._accounts.has_losses:
                await sharing
            else:
                self._services.spawn(sharing)
        self._gradients.open(step, plan.reduce_gradients)
        with self._inbox.opening():
            if self._agreement is not None:
                self._agreement.open_step(step)
            self._tell(ev.StepOpened(step.number, step.mode, step.microbatches, plan.sizes))
        await self._finished.wait()
        # Before the others can hear that this rank is done, and send what belongs to the next step.
        self._mailbox.clear()
        trace = self._recorder.close(step.number, self._core.peaks)
        # On the lane's thread, because reading a loss may wait for the device.
        losses = await self._work.chore("the losses of the step", self.program.losses)
        result = await self._accounts.settle(plan, reduction, trace, self._core.peaks, losses)
        self._progress.end()
        return replace(result, outputs=self.program.outputs())

    async def _reduce(self, virtual_stage: int) -> None:
        await self._gradients.settle(virtual_stage)
        self._tell(ev.ChunkReduced(virtual_stage))

    # Events to the core, its instructions to I/O.

    def _tell(self, event: ev.Event) -> None:
        self._arbiter.kick()  # first, so that the next task starts before sends begin to copy their tensors
        self._apply(event)

    def _apply(self, event: ev.Event) -> None:
        self._progress.touch()
        for instruction in self._core.apply(event):
            self._perform(instruction)

    def _perform(self, instruction: ev.Instruction) -> None:
        match instruction:
            case ev.Send():
                self._services.spawn(self._courier.send(instruction), instruction.task)
            case ev.Credit():
                self._courier.credit(instruction)
            case ev.Release(task):
                self._mailbox.drop(task)
            case ev.ReportReady() | ev.Order() if self._leader_protocol is not None and self._progress.step is not None:
                self._leader_protocol.perform(instruction, self._progress.step)
            case ev.ReduceChunk(virtual_stage):
                self._services.spawn(self._reduce(virtual_stage))
            case ev.FinishStep():
                self._finished.set()
            case _:
                raise ProtocolError(f"stage {self.stage} has no way to perform {instruction}")

    # Tasks on the lane.

    def _dispatch(self, task: Task) -> None:
        self._work.enqueue(task)  # first, because the lane's thread takes some time to wake up
        self._apply(ev.Enqueued(task))  # and no kick: the arbiter, which called this, goes on deciding
        self._progress.enqueued()

    def _completed(self, completed: ev.Completed) -> None:
        if self._leader_protocol is not None and self._progress.step is not None:
            self._leader_protocol.on_completed(completed, self._progress.step)
        self._tell(completed)

    def _waiting(self, cause: WaitCause) -> None:
        if self._progress.step is not None:
            self._recorder.waiting(cause)
