"""Watches for what has stopped: processes, event loops, tasks, and the job as a whole.

A rank that has been idle inside a step, or waiting for all between two steps, for `stall_after` seconds asks rank 0.
That asks all ranks for their status, and passes the verdict on: one log line that names the slow rank, or, of a
deadlock, the end with a report on every rank. Where a rank's loop does not run, there is no verdict: `PeerMonitor`
names that rank.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rrfp import timeouts
from rrfp.core.waiting import describe, past_of, waiting
from rrfp.errors import DeadlockError, OverdueError, PeerLostError, ProtocolError
from rrfp.host import ProcessIdentity, ProcessWatch, ended
from rrfp.log import get_logger
from rrfp.model.tasks import Task
from rrfp.runtime import records
from rrfp.runtime.all_gather import TreeAllGather, bytes_in, to_tensor
from rrfp.runtime.context import RankContext
from rrfp.runtime.control_tree import children, parent
from rrfp.runtime.core_driver import CoreDriver
from rrfp.runtime.messenger import Handler
from rrfp.runtime.stall.peer_monitor import PeerMonitor
from rrfp.runtime.stall.status import RankStatus, StepStatus, Verdict, judge
from rrfp.runtime.stall.status_query import StatusQuery
from rrfp.runtime.start.handshake import StartDigests
from rrfp.transports.base import Channel, Message, MessageKind

logger = get_logger(__name__)

#: A rank asks, or a task ends the pipeline, late by this part of the limit at most.
_PRECISION = 0.01

#: Slices of a limit: after each, the loop looks at its clock.
_SLICES = 4


class AwakeTime:
    """Time in which this process ran: one that was suspended, with all its peers, was neither idle nor slow meanwhile.

    It sleeps in slices of ``limit``, and notices when one took far longer. Used on one loop only.
    """

    def __init__(self, limit: float) -> None:
        self._now = asyncio.get_running_loop().time
        self._slice = limit / _SLICES
        self._went_on_at = -math.inf

    def seconds(self) -> float:
        """Since the process last went on after a suspension, or its loop after a call that blocked it."""
        return self._now() - self._went_on_at

    async def sleep(self, seconds: float) -> None:
        """Sleep for a slice, or ``seconds`` if that is less."""
        seconds = min(seconds, self._slice)
        due = self._now() + seconds
        await asyncio.sleep(seconds)
        if self._now() - due > timeouts.ANSWER_S:
            self._went_on_at = self._now()


class StallProgress:
    """Asks the parts of one rank what they do and wait for."""

    def __init__(self, context: RankContext, driver: CoreDriver) -> None:
        self._topology = context.topology
        self._now = context.lane.now
        self._activity = context.activity
        self._recorder = context.recorder
        self._core = driver.core
        self._driver = driver
        self._executor = driver.executor
        self._messenger = driver.messenger

    def idle_seconds(self) -> float:
        """For how long nothing has happened while all ranks are waited for; 0 otherwise, and while the lane is busy."""
        activity = self._activity
        is_awaited = activity.gathering or (activity.step is not None and not activity.has_returned)
        if not is_awaited or self.running():
            return 0.0
        return self._now() - activity.active_at

    def running(self) -> str | None:
        """The task, or extra call, that the rank is busy with."""
        task = self.running_task()
        return self._executor.extra if task is None else self._core.graph.text_of(task)

    def running_task(self) -> Task | None:
        return self._core.in_flight[0] if self._core.in_flight else None

    def running_seconds(self) -> float:
        """For how long it has been busy with that; 0 where it is idle."""
        return 0.0 if self.running() is None else self._now() - self._executor.running_since

    def status(self) -> RankStatus:
        activity, running, now = self._activity, self.running(), self._now()
        is_in_step = activity.step is not None
        dispute = self._driver.dispute() if is_in_step else None
        wait = self._recorder.wait if running is None and is_in_step else None
        awaits = describe(self._core, self._topology, dispute=dispute) if is_in_step else []
        return RankStatus(
            stage=self._core.stage,
            step=None if activity.step is None else activity.step.number,
            steps_ended=activity.steps_ended,
            running=running,
            running_s=self.running_seconds(),
            can_run=not running and is_in_step and dispute is None and self._core.decide() is not None,
            completed=self._executor.completed,
            sent=self._messenger.sent,
            received=self._messenger.received,
            awaits=(*awaits, *self._driver.gradients.awaited()) if is_in_step else (),
            gathering=activity.gathering,
            gatherings_ended=activity.gatherings_ended,
            name=self._topology.name,
            has_returned=activity.has_returned,
            waits_for="" if wait is None else str(wait[0]),
            waits_s=0.0 if wait is None else now - wait[1],
            training_step=activity.training_step,
            current=self._step_status(),
            at=now,
            story="" if activity.step is None else self._story(),
        )

    def _step_status(self) -> StepStatus | None:
        core, step = self._core, self._core.step
        if step is None or step.id != self._activity.step:
            return None
        return StepStatus(
            mode=str(step.id.mode),
            enqueued=step.num_enqueued,
            tasks=step.num_tasks,
            ready=len(core.ready),
            holding=core.holding,
            slots=core.view.slots,
            limit_bytes=core.limit.bytes,
        )

    def _story(self) -> str:
        """What happened to the first task that the rank waits for."""
        dispute = self._driver.dispute()
        tasks = [entry.task for entry in waiting(self._core, 1)] if dispute is None else [dispute[0]]
        return past_of(self._core, self._topology, tasks[0]) if tasks else ""


@dataclass(frozen=True, slots=True)
class _Introduction:
    """What a rank tells all others first."""

    process: ProcessIdentity
    agreement: StartDigests


class Watchdog:
    """One rank's part in finding out why nothing moves; it asks after ``stall_after`` seconds of idleness."""

    def __init__(self, context: RankContext, driver: CoreDriver, all_gather: TreeAllGather) -> None:
        self._context = context
        self._stall_after = context.settings.stall_after
        self._all_gather = all_gather
        self._post = post = driver.messenger.post
        self._parent = parent(context.topology.rank)
        self._children = children(context.topology.rank, context.topology.world)
        #: The process of each rank, once all have exchanged theirs.
        self._identities: dict[int, ProcessIdentity] = {}
        self._peer_monitor = PeerMonitor(context, self._identities, post)
        self._progress = StallProgress(context, driver)
        self.query = StatusQuery(context, self._status, self._peer_monitor, post)
        self._is_asking = False
        self._asked_at = -math.inf
        self.handlers: Mapping[MessageKind, Handler] = {
            **self._peer_monitor.handlers,
            **self.query.handlers,
            MessageKind.PROBE: self._on_probe,
            MessageKind.VERDICT: self._on_verdict,
        }
        self._processes = ProcessWatch(self._process_ended)

    def services(self) -> Iterable[Coroutine[Any, Any, None]]:
        """Run these until the rank ends."""
        yield self._watch()
        if (abort_after := self._context.settings.abort_after) is not None:
            yield self._end_overdue(abort_after)

    async def _end_overdue(self, limit: float) -> None:
        """Fail once the lane has run something for ``limit`` seconds."""
        progress, awake = self._progress, AwakeTime(limit)
        while (seconds := min(progress.running_seconds(), awake.seconds())) < limit:
            await awake.sleep(max(limit - seconds, _PRECISION * limit))
        running, task, stack = progress.running(), progress.running_task(), self._context.lane.stack()
        text = (
            f"{running} has not completed for {seconds:.1f} s, longer than abort_after, which is {limit:g}, on "
            f"{self._peer_monitor.describe(self._context.topology.rank)}"
        )
        self._context.fail(OverdueError(f"{text}, in:\n{stack}" if stack else text), task)

    async def meet(self, agreement: StartDigests) -> list[StartDigests]:
        """Wait for all ranks, and exchange what they introduce themselves with. Once, at the start.

        Returns the agreements of all ranks, by rank.
        """
        own = ProcessIdentity.own()
        gathered = await self._all_gather.share("start", 0, _Introduction(own, agreement), "the introduction of a rank")
        self._identities.update(enumerate(each.process for each in gathered))
        self._processes.start(self._context.transport.context.peers, self._identities, own)
        return [each.agreement for each in gathered]

    def _status(self) -> RankStatus:
        status = self._progress.status()
        lasts = status.running_s >= self._stall_after
        process = self._peer_monitor.process_of(self._context.topology.rank)
        return replace(status, process=process, stack=self._context.lane.stack() if lasts else "")

    def process_of(self, rank: int) -> ProcessIdentity:
        """The process of ``rank``, once all ranks have met."""
        return self._identities[rank]

    async def let_end(self, rank: int, why: str, *, is_lost: bool) -> bool:
        """Log that this rank ends because ``rank`` failed; wait until the launcher has seen the end of that process.

        Takes `FAILED_PROCESS_GRACE_S` and `LAUNCHER_LOOKS_S` at most. It waits for no process that cannot be watched or
        that is this one. Returns whether ``rank`` is another one, so that its failure was logged here.
        """
        topology = self._context.topology
        if rank == topology.rank:
            return False
        logger.error("%s ends: aborted by %s", topology.name, why)
        process = self._identities.get(rank)
        # A lost process has ended, or it is stopped and will not end.
        grace_s = timeouts.BREAK_GRACE_S if is_lost else timeouts.FAILED_PROCESS_GRACE_S
        if process is not None and await ended(process, ProcessIdentity.own(), grace_s):
            await asyncio.sleep(timeouts.LAUNCHER_LOOKS_S)
        return True

    def close(self) -> None:
        self._processes.close()
        self._peer_monitor.close()

    def _process_ended(self, peer: int) -> None:
        if peer not in self._context.closed_peers:
            self._context.fail(PeerLostError(peer, "its process ended"))

    async def _watch(self) -> None:
        """Ask whenever this rank has been idle for too long, until cancelled."""
        asked_at, awake = 0.0, AwakeTime(self._stall_after)
        while True:
            idle = min(self._progress.idle_seconds(), awake.seconds())
            if idle < max(asked_at, self._stall_after):  # it began anew, or did not last so long
                asked_at = 0.0
            due = asked_at + self._stall_after - idle
            if due <= 0:
                asked_at, due = idle, self._stall_after
                self._probe()
            await awake.sleep(max(due, _PRECISION * self._stall_after))

    def _probe(self) -> None:
        if self._parent is not None:
            self._peer_monitor.expect_answer(self._parent)
            self._post(self._parent, Message(Channel.CONTROL, MessageKind.PROBE))
            return
        # All idle ranks ask at about the same time: one question to all answers them.
        now = asyncio.get_running_loop().time()
        if not self._is_asking and now - self._asked_at >= self._stall_after * (1 - 2 * _PRECISION):
            self._is_asking, self._asked_at = True, now
            self._context.supervisor.spawn(self._ask_all())

    async def _ask_all(self) -> None:
        """On rank 0: ask until the answers tell enough, and pass the verdict on; none where an answer is missing."""
        before: list[RankStatus] | None = None
        try:
            while True:
                job = await self.query.ask(max(timeouts.ANSWER_S, self._stall_after))
                statuses = [answer.status for answer in job.answers if answer.status is not None]
                if len(statuses) < len(job.answers):
                    return
                verdict = judge(statuses, before)
                if verdict.certain:
                    self._take(verdict, _first_idle(statuses))
                    return
                before = statuses
        finally:
            self._is_asking = False

    def _take(self, verdict: Verdict, first: int | None) -> None:
        """Pass the verdict on, and act on it; ``first`` is the lowest rank that waits."""
        packed = to_tensor(records.pack(verdict))
        message = Message(Channel.CONTROL, MessageKind.VERDICT, tensors=(packed,), body={"first": first})
        for child in self._children:
            if child not in self._context.closed_peers:
                self._post(child, message)
        own, text = self._progress.status(), verdict.text
        if verdict.deadlock:
            logger.error("%s", text, stage=own.stage, step=own.step)
            self._context.fail(DeadlockError(text))
        elif first is not None:
            self._context.settings.observer.stalled(text)
            self._context.save_events(text)
            if self._context.topology.rank == first:  # so that there is one line for all
                idle = self._progress.idle_seconds()
                logger.warning(
                    "%s has been idle for %.0f s: %s", own.who, idle, text, stage=own.stage, step=own.step, idle_s=idle
                )

    def _on_probe(self, message: Message) -> None:
        if message.body or message.tensors or message.sender not in self._children:
            raise ProtocolError(
                f"rank {message.sender} sent a {message.kind} that is not for rank {self._context.topology.rank}"
            )
        self._peer_monitor.acknowledge(message.sender)
        self._probe()

    def _on_verdict(self, message: Message) -> None:
        match message.body:
            case {"first": int() | None as first, **rest} if not rest and message.sender == self._parent:
                self._take(records.unpack(Verdict, bytes_in(message), "a verdict"), first)
            case _:
                raise ProtocolError(f"rank {message.sender} sent a {message.kind} that cannot be read")


def _first_idle(statuses: Sequence[RankStatus]) -> int | None:
    for rank, status in enumerate(statuses):
        is_in_step = status.step is not None and not status.has_returned
        if status.gathering or (is_in_step and status.running is None and not status.can_run):
            return rank
    return None
