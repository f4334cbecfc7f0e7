"""Finds out why a rank is idle, and ends a deadlock with a report on every rank.

A rank that has been idle inside a step, or waiting for all between two steps, for `stall_after` seconds asks rank 0.
That asks all ranks for their status, and passes the verdict on: one log line that names the slow rank, or the end.
Where a rank's loop does not run, there is no verdict: `PeerMonitor` names that rank.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence

from rrfp import timeouts
from rrfp.errors import DeadlockError, ProtocolError
from rrfp.log import get_logger
from rrfp.runtime import records
from rrfp.runtime.all_gather import bytes_in, to_tensor
from rrfp.runtime.context import RankContext
from rrfp.runtime.control_tree import children, parent
from rrfp.runtime.messenger import Handler
from rrfp.runtime.stall.awake import AwakeTime
from rrfp.runtime.stall.peer_monitor import PeerMonitor
from rrfp.runtime.stall.progress import StallProgress
from rrfp.runtime.stall.status import RankStatus, Verdict, judge
from rrfp.runtime.stall.status_query import StatusQuery
from rrfp.transports.base import Channel, Message, MessageKind

logger = get_logger(__name__)

#: A rank asks late by this part of `stall_after` at most.
_PRECISION = 0.01


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
        self._context = context
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
            self._context.supervisor.spawn(self._ask_all())

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
            if child not in self._context.closed_peers:
                self._post(child, message)
        own, text = self._progress.status(), verdict.text
        if verdict.deadlock:
            logger.error("%s", text, stage=own.stage, step=own.step)
            self._context.fail(DeadlockError(text))
        elif first is not None:
            self._context.observer.stalled(text)
            self._context.save_events(text)
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
                self._take(records.unpack(Verdict, bytes_in(message), "a verdict"), first)
            case _:
                raise ProtocolError(f"rank {message.sender} sent a {message.kind} that cannot be read")


def _first_idle(statuses: Sequence[RankStatus]) -> int | None:
    """The lowest rank that waits."""
    for rank, status in enumerate(statuses):
        is_in_step = status.step is not None and not status.has_returned
        if status.gathering or (is_in_step and status.running is None and not status.can_run):
            return rank
    return None
