"""Services of a process beside its ranks: the watchdog of the event loop, and the socket for `rrfp top`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from rrfp.errors import ConfigError, PipelineAborted
from rrfp.log import get_logger
from rrfp.pipeline.options import Options
from rrfp.runtime.stage_runner import StageRunner
from rrfp.runtime.stall.loop_watchdog import LoopWatchdog
from rrfp.runtime.status_socket import JobReport, StatusServer, chosen_folder

logger = get_logger(__name__)


class ProcessMonitor:
    """Watches the event loop of a process, and answers `rrfp top`."""

    def __init__(
        self,
        runners: Sequence[StageRunner],
        options: Options,
        title: str,
        give_up: Callable[[PipelineAborted], None] | None,
        stalled: Callable[[str], None],
    ) -> None:
        self._runners = runners
        self._options = options
        self._title = title
        self._give_up = give_up
        self._stalled = stalled
        self._loop_watch: LoopWatchdog | None = None
        self._server: StatusServer | None = None

    def start(self) -> None:
        self._watch_loop()
        self._listen()

    async def close(self) -> None:
        if self._loop_watch is not None:
            self._loop_watch.close()
        if self._server is not None:
            await self._server.close()

    def _watch_loop(self) -> None:
        """Print the stacks of this process when its loop does not run."""
        options, first, give_up = self._options, self._runners[0], self._give_up

        def end(seconds: float) -> None:
            assert give_up is not None
            give_up(first.stuck(seconds))

        self._loop_watch = LoopWatchdog(
            ", ".join(runner.topology.name for runner in self._runners),
            options.stall_after,
            awake_every=options.patience / 4,  # its process does not look frozen
            watch_lock=options.lock_watch and give_up is not None,
            # On the caller's loop the caller's callbacks may take long, except while a peer waits for a rank.
            matters=lambda: give_up is not None or any(runner.abort.is_awaited for runner in self._runners),
            abort_after=None if give_up is None else options.abort_after,
            give_up=end,
            stalled=self._stalled,
        )
        self._loop_watch.start()

    def _listen(self) -> None:
        """Let `rrfp top` look at the job. A job that cannot be looked at runs on."""
        first = self._runners[0]
        try:
            if (folder := chosen_folder()) is None:
                return
            server = StatusServer(folder, first.job, first.topology.rank, self._report)
            server.start()
        except (OSError, ConfigError) as error:
            logger.info("%s: rrfp top cannot look at this process: %s", first.topology.name, error)
        else:
            self._server = server

    async def _report(self) -> JobReport:
        first = self._runners[0]
        if (failure := first.abort.failure) is not None:
            return JobReport(os.getpid(), self._title, failure=f"aborted by {failure.origin}")
        return JobReport(os.getpid(), self._title, survey=await first.health.query.ask())
