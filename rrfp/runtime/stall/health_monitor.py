"""Watches for what has stopped: processes, event loops, tasks, and the job as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from rrfp.core import timeouts
from rrfp.errors import PeerLostError
from rrfp.log import get_logger
from rrfp.runtime import records
from rrfp.runtime.all_gather import TreeAllGather
from rrfp.runtime.context import RankContext
from rrfp.runtime.processes import ProcessIdentity, ProcessWatch, ended
from rrfp.runtime.stall.peer_monitor import PeerMonitor
from rrfp.runtime.stall.progress import Progress
from rrfp.runtime.stall.survey import Surveys
from rrfp.runtime.stall.task_timeout import TaskTimeout
from rrfp.runtime.stall.watchdog import Watchdog
from rrfp.transports.base import Message

logger = get_logger(__name__)


class HealthMonitor:
    """Puts the parts of the module `rrfp.runtime.stall` together; the times are those of `StageRunner`."""

    def __init__(
        self,
        context: RankContext,
        progress: Progress,
        all_gather: TreeAllGather,
        post: Callable[[int, Message], None],
        stall_after: float,
        abort_after: float | None,
    ) -> None:
        self._topology = context.topology
        self._peers = context.transport.context.peers
        self._departures = context.departures
        self._fail = context.fail
        self._all_gather = all_gather
        #: The process of each rank, once all have exchanged theirs.
        self._identities: dict[int, ProcessIdentity] = {}
        self._peer_monitor = PeerMonitor(context, self._identities, post, stall_after, abort_after)
        #: Takes the polls of idle ranks.
        self.watchdog = Watchdog(context, progress, all_gather, self._peer_monitor, stall_after)
        #: Asks all ranks for their status without a stall, for a user who looks.
        self.surveys = Surveys(context, self.watchdog.status, post)
        self._task_timeout = None
        if abort_after is not None:
            self._task_timeout = TaskTimeout(context, progress, abort_after, self._peer_monitor.describe)
        self._processes = ProcessWatch(self._process_ended)

    def services(self) -> Iterable[Coroutine[Any, Any, None]]:
        """Run these until the rank ends."""
        yield self.watchdog.watch()
        yield self.watchdog.answer()
        if self._task_timeout is not None:
            yield self._task_timeout.watch()

    async def meet(self) -> None:
        """Wait for all ranks, and exchange the identities of their processes. Once, at the start."""
        own = ProcessIdentity.own()
        gathered = await self._all_gather.all_gather("start", 0, records.pack(own))
        for rank, data in enumerate(gathered):
            self._identities[rank] = records.unpack(ProcessIdentity, data, "the identity of a process")
        self._processes.start(self._peers, self._identities, own)

    def on_message(self, message: Message) -> None:
        """A PROBE arrived: part of a survey or of a poll."""
        takes = self.surveys if "survey" in message.body else self.watchdog
        takes.on_message(message)

    def process_of(self, rank: int) -> ProcessIdentity:
        """The process of ``rank``, once all ranks have met."""
        return self._identities[rank]

    async def let_end(self, rank: int, why: str) -> None:
        """Wait until the process of ``rank``, which failed, has ended and its launcher has seen it.

        Takes `CULPRIT_GRACE_S` and `LAUNCHER_LOOKS_S` at most. Returns at once where the process is this one, or cannot
        be watched.
        """
        own = self._identities.get(self._topology.rank)
        process = self._identities.get(rank)
        if rank == self._topology.rank or own is None or process is None:
            return
        logger.error("%s ends: aborted by %s", self._topology.name, why)
        if process.pid != own.pid and await ended(process, own, timeouts.CULPRIT_GRACE_S):
            await asyncio.sleep(timeouts.LAUNCHER_LOOKS_S)

    def close(self) -> None:
        """Stop watching. May be called twice."""
        self._processes.close()
        self._peer_monitor.close()

    def _process_ended(self, peer: int) -> None:
        if peer not in self._departures:
            self._fail(PeerLostError(peer, "its process ended"))
