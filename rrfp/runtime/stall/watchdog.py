"""Watches how long a rank is busy with a task, and how long idle: it ends a deadlock with a report on every rank.

A rank that has been idle inside a step, or waiting for all between two steps, for `stall_after` seconds asks rank 0.
That asks all ranks for their status, and passes the verdict on: one log line that names the slow rank, or the end.
Where a rank's loop does not run, there is no verdict: `PeerMonitor` names that rank.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence

from rrfp import timeouts
from rrfp.errors import DeadlockError, OverdueError, ProtocolError
from rrfp.log import get_logger
from rrfp.runtime import records
from rrfp.runtime.all_gather import to_tensor
from rrfp.runtime.context import RankContext
from rrfp.runtime.control_tree import children, parent
from rrfp.runtime.messenger import Handler
from rrfp.runtime.stall.peer_monitor import PeerMonitor
from rrfp.runtime.stall.progress import StallProgress
from rrfp.runtime.stall.status import RankStatus, Verdict, judge
from rrfp.runtime.stall.status_query import StatusQuery
from rrfp.transports.base import Channel, Message, MessageKind

logger = get_logger(__name__)

#: A limit is noticed late by this part of it at most.
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


class TaskTimeout:
    """Watches the lane of one rank, whose tasks may take ``limit`` seconds."""

    def __init__(
        self, context: RankContext, progress: StallProgress, limit: float, describe: Callable[[int], str]
    ) -> None:
        self._rank = context.topology.rank
        self._stack = context.lane.stack
        self._fail = context.fail
        self._progress = progress
        self._limit = limit
        self._describe = describe

    async def watch(self) -> None:
        """Fail once something has run for too long."""
        awake = AwakeTime(self._limit)
        while (seconds := min(self._progress.running_seconds(), awake.seconds())) < self._limit:
            await awake.sleep(max(self._limit - seconds, _PRECISION * self._limit))
        running, task = self._progress.running(), self._progress.running_task()
        stack = self._stack()
        text = (
            f"{running} has not completed for {seconds:.1f} s, longer than abort_after, which is {self._limit:g}, on "
            f"{self._describe(self._rank)}"
        )
        self._fail(OverdueError(f"{text}, in:\n{stack}" if stack else text), task)


class Watchdog:
    """One rank's part in finding stalls; it asks after ``stall_after`` seconds of idleness."""

    def __init__(
        self,
        context: RankContext,
        progress: StallProgress,
        query: StatusQuery,
        peer_monitor: PeerMonitor,
        post: Callable[[int, Message], None],
        stall_after: float,
    ) -> None:
        self._rank = rank = context.topology.rank
        self._parent = parent(rank)
        self._children = children(rank, context.topology.world)
        self._fail = context.fail
        self._observer = context.observer
        self._spawn = context.supervisor.spawn
        self._save_events = context.save_events
        self._closed_peers = context.closed_peers
        self._progress = progress
        self._query = query
        self._peer_monitor = peer_monitor
        self._post = post
        self._stall_after = stall_after
        self._is_asking = False
        self._asked_at = -math.inf
        self.handlers: Mapping[MessageKind, Handler] = {
            MessageKind.PROBE: self._on_probe,
            MessageKind.VERDICT: self._on_verdict,
        }

    async def watch(self) -> None:
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
            self._spawn(self._ask_all())

    async def _ask_all(self) -> None:
        """On rank 0: ask until the answers tell enough, and pass the verdict on; none where an answer is missing."""
        before: list[RankStatus] | None = None
        try:
            while True:
                job = await self._query.ask(max(timeouts.ANSWER_S, self._stall_after))
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
            if child not in self._closed_peers:
                self._post(child, message)
        own, text = self._progress.status(), verdict.text
        if verdict.deadlock:
            logger.error("%s", text, stage=own.stage, step=own.step)
            self._fail(DeadlockError(text))
        elif first is not None:
            self._observer.stalled(text)
            self._save_events(text)
            if self._rank == first:  # so that there is one line for all
                idle = self._progress.idle_seconds()
                logger.warning(
                    "%s has been idle for %.0f s: %s", own.who, idle, text, stage=own.stage, step=own.step, idle_s=idle
                )

    def _on_probe(self, message: Message) -> None:
        if message.body or message.tensors or message.sender not in self._children:
            raise ProtocolError(f"rank {message.sender} sent a {message.kind} that is not for rank {self._rank}")
        self._peer_monitor.acknowledge(message.sender)
        self._probe()

    def _on_verdict(self, message: Message) -> None:
        match message.body:
            case {"first": int() | None as first, **rest} if not rest and message.sender == self._parent:
                tensor = message.tensors[0] if len(message.tensors) == 1 else None
                packed = b"" if tensor is None else tensor.numpy().tobytes()
                self._take(records.unpack(Verdict, packed, "a verdict"), first)
            case _:
                raise ProtocolError(f"rank {message.sender} sent a {message.kind} that cannot be read")


def _first_idle(statuses: Sequence[RankStatus]) -> int | None:
    """The lowest rank that waits."""
    for rank, status in enumerate(statuses):
        is_in_step = status.step is not None and not status.has_returned
        if status.gathering or (is_in_step and status.running is None and not status.can_run):
            return rank
    return None
