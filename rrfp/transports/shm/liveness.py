"""Whether the processes of the peers are alive: a pidfd says that one ended, /proc that one is stopped or frozen.

Mostly the end of a socket comes first. But a child that a rank forked keeps the rank's sockets open, and a stopped
process (SIGSTOP, a debugger) or a frozen one (its cgroup: a paused container) ends none. No peer is asked to answer:
its loop may rightly be busy for seconds with a call that keeps the interpreter's lock.

A frozen process has no state of its own: it shows D with the first version of cgroups, S with the second. Its cgroup
says it. Where that cannot be read, as from another container, a process counts as frozen while none of its threads is
given a core. A rank that is only stuck has the thread of its `LoopWatchdog`, which wakes up several times in the time
that the watch has patience.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rrfp.errors import TransportError
from rrfp.host import pidfd
from rrfp.transports.links.flow import HomeLoop

#: States of a process in /proc/PID/stat: stopped by a signal, and by a debugger.
_STOPPED = (b"T", b"t")


@dataclass(slots=True)
class _Process:
    pid: int
    descriptor: int
    on_lost: Callable[[str], None]
    ticks: int = -1  # of processor time
    switches: int = -1  # how often its threads gave up a core
    still_s: float | None = None  # for how long it has been stopped or frozen; None while it runs


class PeerLiveness:
    """Watches processes. Used on one loop only."""

    def __init__(self, home: HomeLoop, interval_s: float, patience_s: float) -> None:
        self._loop = home.loop
        self._interval_s = interval_s
        self._patience_s = patience_s
        self._processes: dict[int, _Process] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._looked_s = home.loop.time()

    def watch(self, peer: int, pid: int, on_lost: Callable[[str], None]) -> None:
        """Call ``on_lost`` with the reason once the process ended, or was stopped or frozen too long."""
        try:
            descriptor = pidfd(pid)
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
            if not (how := _stands_still(process)):
                process.still_s = None
                continue
            process.still_s = 0.0 if process.still_s is None else process.still_s + seen_s
            if process.still_s >= self._patience_s:
                self.forget(peer)
                process.on_lost(f"its process {how}, for {self._patience_s:g} s already")

    def close(self) -> None:
        """Watch nothing more. May be called twice."""
        for peer in list(self._processes):
            self.forget(peer)
        if self._timer is not None:
            self._timer.cancel()


def _stands_still(process: _Process) -> str:
    """How ``process`` stands still; empty if it may run."""
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:  # it has ended, which its pidfd says
        return ""
    ticks_before, process.ticks = process.ticks, int(fields[11]) + int(fields[12])
    if fields[0] in _STOPPED:
        return "is stopped"
    if process.ticks != ticks_before:
        return ""
    if (frozen := is_frozen(process.pid)) is not None:
        return "is frozen with its cgroup" if frozen else ""
    switches_before, process.switches = process.switches, _switches(process.pid)
    return "" if process.switches != switches_before else "is given no core, as if its container were paused"


def _switches(pid: int) -> int:
    """How often the threads of a process gave up a core."""
    count = 0
    for thread in Path(f"/proc/{pid}/task").glob("*/status"):
        with suppress(OSError):
            lines = thread.read_text().splitlines()
            count += 1 + sum(int(line.split()[1]) for line in lines if "ctxt_switches:" in line)
    return count


def is_frozen(pid: int) -> bool | None:
    """Whether a cgroup of process ``pid`` is frozen; None if unreadable."""
    answers = set()
    try:
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0" or "freezer" in controllers.split(","):
                answers.add(_is_frozen("" if number == "0" else "freezer", path))
    except (OSError, ValueError):
        return None
    return True if True in answers else None if None in answers or not answers else False


def _is_frozen(controller: str, path: str) -> bool | None:
    if (mount := _mounts().get(controller)) is None:
        return None
    top, folder = mount[0].rstrip("/"), mount[1]
    if ".." in path.split("/") or not f"{path}/".startswith(f"{top}/"):  # outside of what this process sees
        return None
    own = Path(folder, path.removeprefix(top).lstrip("/"))
    try:
        if controller:
            return (own / "freezer.state").read_text().strip() != "THAWED"
        return "frozen 1" in (own / "cgroup.events").read_text().splitlines()
    except FileNotFoundError:  # the root of all has no such file, and is never frozen
        return False if (own / "cgroup.procs").exists() and path == "/" else None
    except OSError:
        return None


@cache
def _mounts() -> dict[str, tuple[str, str]]:
    """Mounts of the second version of cgroups, and of the first one's freezer."""
    mounts: dict[str, tuple[str, str]] = {}
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields, _, rest = line.partition(" - ")
            kind, _, options = rest.split(" ", 2)
            if kind == "cgroup2" or (kind == "cgroup" and "freezer" in options.split(" ")[-1].split(",")):
                root, folder = fields.split(" ")[3:5]
                mounts.setdefault("" if kind == "cgroup2" else "freezer", (root, folder))
    return mounts
