"""Finds out why a rank is idle, and ends a deadlock with a report on every rank.

A rank that has been idle inside a step, or waiting for all between two steps, for `stall_after` seconds asks rank 0,
which polls everybody over the control tree. All ranks get all answers and come to the same verdict: one log line that
names the slow rank, or the end.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

from rrfp.control.exchange import TreeExchange
from rrfp.control.progress import Progress
from rrfp.control.status import RankStatus, judge
from rrfp.control.tree import children, parent
from rrfp.errors import DeadlockError
from rrfp.log import get_logger
from rrfp.transports.base import Channel, Message, MessageKind

logger = get_logger(__name__)

_TOPIC = "poll"


class Watchdog:
    """One rank's part in finding stalls.

    Args:
        progress: how its rank is doing.
        rank: its rank.
        world: all ranks.
        exchange: the all-gather for answers.
        post: queues a control message for a peer.
        fail: ends the pipeline.
        stall_after: seconds of idleness before asking; must be positive.
    """

    def __init__(
        self,
        progress: Progress,
        rank: int,
        world: int,
        exchange: TreeExchange,
        post: Callable[[int, Message], None],
        fail: Callable[[Exception], None],
        stall_after: float,
    ) -> None:
        self._progress = progress
        self._rank = rank
        self._parent = parent(rank)
        self._children = children(rank, world)
        self._exchange = exchange
        self._post = post
        self._fail = fail
        self._stall_after = stall_after
        self._polls: asyncio.Queue[int] = asyncio.Queue()
        self._next_poll = 0
        self._polling = False
        self._before: list[RankStatus] | None = None
        self._polled_at = -math.inf

    async def watch(self) -> None:
        """Ask whenever this rank has been idle for too long, until cancelled."""
        asked_at = 0.0
        while True:
            await asyncio.sleep(self._stall_after / 4)
            idle = self._progress.idle_seconds()
            if idle < self._stall_after:
                asked_at = 0.0
            elif idle - asked_at >= self._stall_after:
                asked_at = idle
                self._ask()

    async def answer(self) -> None:
        """Join every poll, until cancelled."""
        while True:
            number = await self._polls.get()
            own = self._progress.status()
            answers = await self._exchange.exchange(_TOPIC, number, own.encode())
            statuses = [RankStatus.decode(data) for data in answers]
            verdict = judge(statuses, self._before)
            self._before = statuses
            self._polling = False
            if verdict.deadlock:
                logger.error("%s", verdict.text, stage=own.stage, step=own.step)
                self._fail(DeadlockError(verdict.text))
            elif not verdict.certain and self._parent is None:
                self._start_poll()
            elif verdict.certain and self._rank == _first_idle(statuses):
                idle = self._progress.idle_seconds()
                logger.warning(
                    "%s has been idle for %.0f s: %s",
                    own.who,
                    idle,
                    verdict.text,
                    stage=own.stage,
                    step=own.step,
                    idle_s=idle,
                )

    def take(self, message: Message) -> None:
        """A PROBE arrived: a question on its way up, or a poll on its way down."""
        number = message.body.get("poll")
        if isinstance(number, int):
            self._join(number)
        else:
            self._ask()

    def _ask(self) -> None:
        if self._parent is not None:
            self._post(self._parent, Message(Channel.CONTROL, MessageKind.PROBE))
        elif not self._polling and asyncio.get_running_loop().time() - self._polled_at >= self._stall_after:
            self._start_poll()  # all idle ranks ask at about the same time: one poll answers them

    def _start_poll(self) -> None:
        self._polling = True
        self._polled_at = asyncio.get_running_loop().time()
        self._join(self._next_poll)
        self._next_poll += 1

    def _join(self, number: int) -> None:
        for child in self._children:
            self._post(child, Message(Channel.CONTROL, MessageKind.PROBE, body={"poll": number}))
        self._polls.put_nowait(number)


def _first_idle(statuses: Sequence[RankStatus]) -> int | None:
    """The lowest rank that waits: the one that logs, so that there is one line for all."""
    for rank, status in enumerate(statuses):
        if status.gathering or (status.step is not None and status.running is None and not status.can_run):
            return rank
    return None
