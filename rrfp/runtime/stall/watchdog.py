"""Finds out why a rank is idle, and ends a deadlock with a report on every rank.

A rank that has been idle inside a step, or waiting for all between two steps, for `stall_after` seconds asks rank 0,
which polls all ranks over the control tree. All ranks receive all answers and reach the same verdict: one log line that
names the slow rank, or the end. Where a rank's loop does not run, no poll ends: `PeerMonitor` names that rank, and the
next poll takes the place of the one before.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace

from rrfp import timeouts
from rrfp.errors import DeadlockError
from rrfp.log import get_logger
from rrfp.runtime import records
from rrfp.runtime.all_gather import SupersededError, TreeAllGather
from rrfp.runtime.context import RankContext
from rrfp.runtime.control_tree import children, parent
from rrfp.runtime.stall.awake import AwakeTime
from rrfp.runtime.stall.peer_monitor import PeerMonitor
from rrfp.runtime.stall.progress import StallProgress
from rrfp.runtime.stall.status import RankStatus, judge
from rrfp.transports.base import Channel, Message, MessageKind

logger = get_logger(__name__)

_TOPIC = "poll"

#: A rank asks late by this part of `stall_after` at most.
_PRECISION = 0.01


class Watchdog:
    """One rank's part in finding stalls: it asks after ``stall_after`` seconds of idleness, and answers every poll."""

    def __init__(
        self,
        context: RankContext,
        progress: StallProgress,
        all_gather: TreeAllGather,
        peer_monitor: PeerMonitor,
        stall_after: float,
    ) -> None:
        self._rank = rank = context.topology.rank
        self._parent = parent(rank)
        self._children = children(rank, context.topology.world)
        self._stack = context.lane.stack
        self._fail = context.fail
        self._observer = context.observer
        self._progress = progress
        self._all_gather = all_gather
        self._peer_monitor = peer_monitor
        self._stall_after = stall_after
        self._polls: asyncio.Queue[int] = asyncio.Queue()
        self._next_poll = 0
        self._before: list[RankStatus] | None = None
        self._polling = False
        self._polled_at = -math.inf

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
                self._ask()
            await awake.sleep(max(due, _PRECISION * self._stall_after))

    async def answer(self) -> None:
        """Join every poll, until cancelled."""
        while True:
            number = await self._polls.get()
            own = self.status()
            try:
                answers = await self._all_gather.all_gather(_TOPIC, number, records.pack(own))
            except SupersededError:
                continue
            statuses = [records.unpack(RankStatus, data, "a status") for data in answers]
            verdict = judge(statuses, self._before)
            self._before = statuses
            self._polling = False
            if verdict.deadlock:
                logger.error("%s", verdict.text, stage=own.stage, step=own.step)
                self._fail(DeadlockError(verdict.text))
            elif not verdict.certain and self._parent is None:
                self._start_poll()
            elif verdict.certain and (first := _first_idle(statuses)) is not None:
                self._observer.stalled(verdict.text)
                if self._rank == first:
                    self._log(own, verdict.text)

    def _log(self, own: RankStatus, text: str) -> None:
        idle = self._progress.idle_seconds()
        logger.warning(
            "%s has been idle for %.0f s: %s", own.who, idle, text, stage=own.stage, step=own.step, idle_s=idle
        )

    def status(self) -> RankStatus:
        """This rank's answer to a poll, and to a survey."""
        status = self._progress.status()
        process = self._peer_monitor.process_of(self._rank)
        lasts = status.running_s >= self._stall_after
        return replace(status, process=process, stack=self._stack() if lasts else "")

    def on_message(self, message: Message) -> None:
        """A PROBE arrived: a question on its way up, or a poll on its way down."""
        match message.body:
            case {"acknowledged": True}:
                self._peer_monitor.on_acknowledged(message.sender)
            case {"unresponsive": _}:
                self._peer_monitor.on_message(message)
            case {"poll": int(number)} if message.sender == self._parent:
                self._peer_monitor.acknowledge(message.sender)
                self._join(number)
            case _:
                self._peer_monitor.acknowledge(message.sender)
                self._ask()

    def _ask(self) -> None:
        if self._parent is not None:
            self._peer_monitor.ask(self._parent, Message(Channel.CONTROL, MessageKind.PROBE))
            return
        # All idle ranks ask at about the same time: one poll answers them. It ends, unless a rank does not answer.
        is_due = asyncio.get_running_loop().time() - self._polled_at >= self._stall_after * (1 - 2 * _PRECISION)
        lately = self._polled_at - 2 * max(self._stall_after, timeouts.ANSWER_S)
        if is_due and (not self._polling or self._peer_monitor.missed_since(lately)):
            self._start_poll()

    def _start_poll(self) -> None:
        self._polling = True
        self._polled_at = asyncio.get_running_loop().time()
        self._join(self._next_poll)
        self._next_poll += 1

    def _join(self, number: int) -> None:
        self._all_gather.supersede(_TOPIC, number)
        for child in self._children:
            self._peer_monitor.ask(child, Message(Channel.CONTROL, MessageKind.PROBE, body={"poll": number}))
        self._polls.put_nowait(number)


def _first_idle(statuses: Sequence[RankStatus]) -> int | None:
    """The lowest rank that waits: the one that logs, so that there is one line for all."""
    for rank, status in enumerate(statuses):
        is_in_step = status.step is not None and not status.has_returned
        if status.gathering or (is_in_step and status.running is None and not status.can_run):
            return rank
    return None
