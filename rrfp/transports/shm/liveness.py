"""Whether the processes of the peers are alive: a pidfd says that one ended, /proc that one is stopped.

Mostly the end of a socket comes first. But a child that a rank forked keeps the rank's sockets open, and a stopped
process (SIGSTOP, a debugger) ends none. No peer is asked to answer: its loop may rightly be busy for seconds with a
call that keeps the interpreter's lock.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rrfp.errors import TransportError
from rrfp.transports.flow import HomeLoop

#: States of a process in /proc/PID/stat: stopped by a signal, and by a debugger.
_STOPPED = (b"T", b"t")


@dataclass(slots=True)
class _Process:
    pid: int
    descriptor: int
    on_lost: Callable[[str], None]
    stopped_s: float | None = None  # for how long; None while it runs


class ProcessWatch:
    """Watches processes. Used on one loop only.

    Args:
        home: the loop.
        interval_s: seconds between two looks at /proc.
        patience_s: how long a process may be stopped.
    """

    def __init__(self, home: HomeLoop, interval_s: float, patience_s: float) -> None:
        self._loop = home.loop
        self._interval_s = interval_s
        self._patience_s = patience_s
        self._processes: dict[int, _Process] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._looked_s = home.loop.time()

    def watch(self, peer: int, pid: int, on_lost: Callable[[str], None]) -> None:
        """Call ``on_lost`` with the reason once the process of ``peer`` has ended, or was stopped for too long.

        Raises a TransportError if this process may open no more files.
        """
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._loop.call_soon(on_lost, "its process ended")
            return
        except OSError as error:
            raise TransportError(f"cannot watch process {pid} of rank {peer}: {error}") from error
        self._processes[peer] = _Process(pid, descriptor, on_lost)
        self._loop.add_reader(descriptor, self._on_ended, peer)
        if self._timer is None:
            self._timer = self._loop.call_later(self._interval_s, self._look)

    def forget(self, peer: int) -> None:
        """Watch the process of ``peer`` no more. May be called twice."""
        if (process := self._processes.pop(peer, None)) is not None:
            self._loop.remove_reader(process.descriptor)
            os.close(process.descriptor)

    def _on_ended(self, peer: int) -> None:
        on_lost = self._processes[peer].on_lost
        self.forget(peer)
        on_lost("its process ended")

    def _look(self) -> None:
        self._timer = self._loop.call_later(self._interval_s, self._look)
        now_s = self._loop.time()
        # If this process was stopped too, as all ranks are by Ctrl-Z, it has seen nothing of the time before this look.
        seen_s = min(now_s - self._looked_s, 2 * self._interval_s)
        self._looked_s = now_s
        for peer, process in list(self._processes.items()):
            if not _is_stopped(process.pid):
                process.stopped_s = None
                continue
            process.stopped_s = 0.0 if process.stopped_s is None else process.stopped_s + seen_s
            if process.stopped_s >= self._patience_s:
                self.forget(peer)
                process.on_lost(f"its process is stopped, for {self._patience_s:g} s already")

    def close(self) -> None:
        """Watch nothing more. May be called twice."""
        for peer in list(self._processes):
            self.forget(peer)
        if self._timer is not None:
            self._timer.cancel()


def _is_stopped(pid: int) -> bool:
    with suppress(OSError):  # it has ended, which its pidfd says
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        return stat.rpartition(b")")[2].split()[0] in _STOPPED
    return False
