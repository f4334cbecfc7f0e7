"""Watches for what has stopped: processes, event loops, tasks, and the job as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rrfp import timeouts
from rrfp.errors import PeerLostError
from rrfp.host import ProcessIdentity, ProcessWatch, ended
from rrfp.log import get_logger
from rrfp.runtime import records
from rrfp.runtime.all_gather import TreeAllGather
from rrfp.runtime.context import RankContext, RankSettings
from rrfp.runtime.core_driver import CoreDriver
from rrfp.runtime.messenger import Handler
from rrfp.runtime.stall.peer_monitor import PeerMonitor
from rrfp.runtime.stall.progress import StallProgress
from rrfp.runtime.stall.status import RankStatus
from rrfp.runtime.stall.status_query import StatusQuery
from rrfp.runtime.stall.watchdog import TaskTimeout, Watchdog
from rrfp.runtime.start.handshake import StartDigests
from rrfp.transports.base import MessageKind

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Introduction:
    """What a rank tells all others first."""

    process: ProcessIdentity
    agreement: StartDigests


class HealthMonitor:
    """Puts the parts of the module `rrfp.runtime.stall` together."""

    def __init__(
        self,
        context: RankContext,
        driver: CoreDriver,
        all_gather: TreeAllGather,
        settings: RankSettings,
    ) -> None:
        post, stall_after, abort_after = driver.messenger.post, settings.stall_after, settings.abort_after
        progress = StallProgress(context, driver)
        self._topology = context.topology
        self._peers = context.transport.context.peers
        self._closed_peers = context.closed_peers
        self._fail = context.fail
        self._all_gather = all_gather
        #: The process of each rank, once all have exchanged theirs.
        self._identities: dict[int, ProcessIdentity] = {}
        self._peer_monitor = peers = PeerMonitor(context, self._identities, post, stall_after, abort_after)
        self._progress = progress
        self._stall_after = stall_after
        self._stack = context.lane.stack
        #: Asks all ranks for their status.
        self.query = StatusQuery(context, self._status, peers, post)
        self._watchdog = Watchdog(context, progress, self.query, peers, post, stall_after)
        self.handlers: Mapping[MessageKind, Handler] = {
            **peers.handlers,
            **self.query.handlers,
            **self._watchdog.handlers,
        }
        self._task_timeout = None
        if abort_after is not None:
            self._task_timeout = TaskTimeout(context, progress, abort_after, self._peer_monitor.describe)
        self._processes = ProcessWatch(self._process_ended)

    def services(self) -> Iterable[Coroutine[Any, Any, None]]:
        """Run these until the rank ends."""
        yield self._watchdog.watch()
        if self._task_timeout is not None:
            yield self._task_timeout.watch()

    async def meet(self, agreement: StartDigests) -> list[StartDigests]:
        """Wait for all ranks, and exchange what they introduce themselves with. Once, at the start.

        Returns the agreements of all ranks, by rank.
        """
        own = ProcessIdentity.own()
        gathered = await self._all_gather.all_gather("start", 0, records.pack(_Introduction(own, agreement)))
        agreements = []
        for rank, data in enumerate(gathered):
            introduction = records.unpack(_Introduction, data, "the introduction of a rank")
            self._identities[rank] = introduction.process
            agreements.append(introduction.agreement)
        self._processes.start(self._peers, self._identities, own)
        return agreements

    def _status(self) -> RankStatus:
        status = self._progress.status()
        lasts = status.running_s >= self._stall_after
        process = self._peer_monitor.process_of(self._topology.rank)
        return replace(status, process=process, stack=self._stack() if lasts else "")

    def process_of(self, rank: int) -> ProcessIdentity:
        """The process of ``rank``, once all ranks have met."""
        return self._identities[rank]

    async def let_end(self, rank: int, why: str, *, is_lost: bool) -> bool:
        """Log that this rank ends because ``rank`` failed; wait until the launcher has seen the end of that process.

        Takes `FAILED_PROCESS_GRACE_S` and `LAUNCHER_LOOKS_S` at most. It waits for no process that cannot be watched or
        that is this one. Returns whether ``rank`` is another one, so that its failure was logged here.
        """
        if rank == self._topology.rank:
            return False
        logger.error("%s ends: aborted by %s", self._topology.name, why)
        process = self._identities.get(rank)
        # A lost process has ended, or it is stopped and will not end.
        grace_s = timeouts.BREAK_GRACE_S if is_lost else timeouts.FAILED_PROCESS_GRACE_S
        if process is not None and await ended(process, ProcessIdentity.own(), grace_s):
            await asyncio.sleep(timeouts.LAUNCHER_LOOKS_S)
        return True

    def close(self) -> None:
        """Stop watching. May be called twice."""
        self._processes.close()
        self._peer_monitor.close()

    def _process_ended(self, peer: int) -> None:
        if peer not in self._closed_peers:
            self._fail(PeerLostError(peer, "its process ended"))
