"""The jobs of this user on this host that can be looked at, found by their status sockets."""

from __future__ import annotations

import os
import socket
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from rrfp import timeouts
from rrfp.errors import ConfigError, RrfpError
from rrfp.host import peer_credentials
from rrfp.runtime.status_socket.folder import VARIABLE, SocketFile, chosen_folder, sockets_in
from rrfp.runtime.status_socket.report import MOST_BYTES, JobReport


def read_report(file: SocketFile) -> JobReport:
    """The report of the process at ``file``; takes `STATUS_S` at most."""
    deadline = time.monotonic() + timeouts.STATUS_S
    with socket.socket(socket.AF_UNIX) as sock:
        _connect(sock, file, deadline)
        if (user := peer_credentials(sock)[1]) != os.geteuid():
            raise RrfpError(f"{file.path}: the process that listens there belongs to user {user}")
        line = bytearray()
        while not line.endswith(b"\n") and len(line) <= MOST_BYTES:
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
            received = sock.recv(1 << 16)
            if not received:
                raise ConnectionResetError
            line += received
    return JobReport.read(bytes(line))


def _connect(sock: socket.socket, file: SocketFile, deadline: float) -> None:
    while True:
        try:
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
            sock.connect(os.fspath(file.path))
            return
        except BlockingIOError:  # other programs look too
            if time.monotonic() >= deadline:
                raise TimeoutError from None
            time.sleep(timeouts.STATUS_PAUSE_S)


#: Characters of a command line in a list of jobs.
_COMMAND_LENGTH = 60


class JobEnded(Exception):
    """No process of the job listens any more."""


class SilentJobError(RrfpError):
    """Processes of the job listen, and none answers."""


class Job:
    """One job, by the sockets of its processes on this host: where one is silent or has ended, it asks the next."""

    def __init__(self, files: Iterable[SocketFile]) -> None:
        self._files = list(files)

    @property
    def pids(self) -> list[int]:
        """Its processes, by rank."""
        return [file.pid for file in self._files]

    @property
    def path(self) -> Path:
        """The socket of its first process."""
        return self._files[0].path

    def __str__(self) -> str:
        """Its first process and command line."""
        command = ""
        with suppress(OSError):
            command = Path(f"/proc/{self.pids[0]}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        command = " ".join(command.split())
        if len(command) > _COMMAND_LENGTH:
            command = f"{command[: _COMMAND_LENGTH - 1]}…"
        return f"{self.pids[0]} ({command})" if command else str(self.pids[0])

    def is_alive(self) -> bool:
        """Whether any process of it listens; forgets the others, whose ids other processes may have now."""
        self._files = [file for file in self._files if file.has_listener()]
        return bool(self._files)

    def read(self) -> JobReport:
        """The report of the first process that answers; the next time it is asked first."""
        for _ in list(self._files):
            try:
                return read_report(self._files[0])
            except TimeoutError:
                self._files.append(self._files.pop(0))
            except (ConnectionError, FileNotFoundError):
                self._files.pop(0)
        if not self._files:
            raise JobEnded
        pids = ", ".join(map(str, self.pids))
        raise SilentJobError(f"no process of the job on this host answers: the event loops of {pids} do not run")


def find_job(wanted: str | None) -> Job:
    """The job of this user on this host that has the process id, or the socket, ``wanted``; None: the only one."""
    if wanted is not None and not wanted.isdecimal():
        return _at(Path(wanted))
    folder = chosen_folder()
    if folder is None:
        raise ConfigError(f"{VARIABLE} is '0', which turns status sockets off; pass the path of one")
    try:
        files = sockets_in(folder)
    except OSError as error:
        raise ConfigError(f"jobs cannot be found: {error}") from None
    by_job = defaultdict(list)
    for file in files:
        by_job[file.job].append(file)
    jobs = [job for job in map(Job, by_job.values()) if job.is_alive()]
    if not jobs:
        raise RrfpError(f"no job of this user can be looked at: none has a socket in {folder}")
    chosen = jobs if wanted is None else [job for job in jobs if int(wanted) in job.pids]
    if len(chosen) == 1:
        return chosen[0]
    if not chosen:
        raise ConfigError(f"no job has a process {wanted}, must be one of: {', '.join(map(str, jobs))}")
    if wanted is None and len({job.pids[0] for job in chosen}) == len(chosen):
        raise ConfigError(f"{len(jobs)} jobs run, choose one by its process id: {', '.join(map(str, chosen))}")
    paths = ", ".join(str(job.path) for job in chosen)
    raise ConfigError(f"{len(chosen)} pipelines run in one process, choose one by its socket: {paths}")


def _at(path: Path) -> Job:
    file = SocketFile.read(path.absolute())
    if file is None or not path.is_socket():
        raise ConfigError(f"job is {str(path)!r}, must be the id of a process or the path of its status socket")
    job = Job([file])
    if not job.is_alive():
        raise RrfpError(f"{path}: its process has ended")
    return job
