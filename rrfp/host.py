"""The host of this process: its start, its processes, and the users at the other end of local sockets.

Ranks exchange this at the start. The end of a connection is not enough to notice the end of a process: children that
were forked from it, such as the workers of a data loader, keep its sockets open. On the same host a pidfd becomes
readable the moment the process ends. Ids are used again, so an id counts only with the time of the process's start.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rrfp import timeouts

#: Process, user, group.
_CREDENTIALS = struct.Struct("=iII")

#: Whether this system knows the users of local sockets; Linux does.
KNOWS_USERS = hasattr(socket, "SO_PEERCRED")


def boot_id() -> str:
    """The id of the host's current start; an OSError where /proc does not have it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def namespace(kind: str) -> str:
    """This process's namespace of a kind, such as ``pid`` or ``net``; an OSError where /proc does not have it."""
    return os.readlink(f"/proc/self/ns/{kind}")


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """The process id and the user id of the process at the other end; the id is 0 in another pid namespace."""
    pid, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(pid), int(user)


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process."""

    host: str
    pid: int
    #: When it began, in clock ticks since the host's start; 0 where that is not known.
    started: int = 0
    #: What names the host and the space of its process ids; empty where that is not known.
    space: str = ""

    @classmethod
    def own(cls) -> ProcessIdentity:
        return _identity(os.getpid())

    def __str__(self) -> str:
        return f"host {self.host}, pid {self.pid}"


@cache
def _identity(own: int) -> ProcessIdentity:
    """Of this process, whose id is ``own``: a forked child has another."""
    space = ""
    with suppress(OSError):
        space = f"{boot_id()} {namespace('pid')}"
    return ProcessIdentity(socket.gethostname(), own, started_at(own), space)


def started_at(pid: int) -> int:
    """When the process with id ``pid`` began, in clock ticks since the host's start; 0 where that is not known."""
    with suppress(OSError, ValueError, IndexError):
        # The command, in parentheses, may hold anything; the 20th field behind it is the time.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return 0


def pidfd(pid: int) -> int:
    """A descriptor that becomes readable when the process ends; an OSError where it has ended or cannot be watched."""
    if not hasattr(os, "pidfd_open"):
        raise OSError(errno.ENOSYS, "this system has no pidfd_open")
    return os.pidfd_open(pid)


def open_pidfd(process: ProcessIdentity, own: ProcessIdentity) -> int | None:
    """A descriptor that becomes readable when ``process`` ends; None where it cannot be watched from here.

    Raises ProcessLookupError if it has ended already.
    """
    if process.pid == own.pid or not process.space or process.space != own.space or not process.started:
        return None
    try:
        descriptor = pidfd(process.pid)
    except ProcessLookupError:
        raise
    except OSError:  # no descriptor left, or not allowed here
        return None
    if started_at(process.pid) != process.started:
        os.close(descriptor)
        raise ProcessLookupError(f"{process} ended, and its id was given to another process")
    return descriptor


async def ended(process: ProcessIdentity, own: ProcessIdentity, timeout_s: float) -> bool:
    """Whether ``process`` has ended, or does so within ``timeout_s``; False where it cannot be watched from here."""
    try:
        descriptor = open_pidfd(process, own)
    except ProcessLookupError:
        return True
    if descriptor is None:
        return False
    loop, seen = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, seen.set)
    try:
        async with asyncio.timeout(timeout_s):
            await seen.wait()
        return True
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


class ProcessWatch:
    """Notices when a peer's process on this host ends. Used on one loop only.

    ``lost`` is called with the peer some time after its end: its last messages are read first.
    """

    def __init__(self, lost: Callable[[int], None]) -> None:
        self._lost = lost
        self._descriptors: dict[int, int] = {}
        self._timers: list[asyncio.TimerHandle] = []

    def start(self, peers: Iterable[int], processes: Mapping[int, ProcessIdentity], own: ProcessIdentity) -> None:
        loop = asyncio.get_running_loop()
        for peer in peers:
            try:
                descriptor = open_pidfd(processes[peer], own)
            except ProcessLookupError:
                self._report_soon(peer)
                continue
            if descriptor is not None:
                self._descriptors[peer] = descriptor
                loop.add_reader(descriptor, self._ended, peer)

    def close(self) -> None:
        for timer in self._timers:
            timer.cancel()
        for peer in list(self._descriptors):
            self._forget(peer)

    def _ended(self, peer: int) -> None:
        self._forget(peer)
        self._report_soon(peer)

    def _report_soon(self, peer: int) -> None:
        loop = asyncio.get_running_loop()
        self._timers.append(loop.call_later(timeouts.LAST_MESSAGES_S, self._lost, peer))

    def _forget(self, peer: int) -> None:
        descriptor = self._descriptors.pop(peer)
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
