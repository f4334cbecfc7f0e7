"""The Unix socket of a process at which a user looks at a job, and its reader. See `rrfp top`.

A program that connects gets one line, a `JobReport`, and the connection ends. Nothing is read from it, so nothing that
it sends matters. It must run as the same user: only that one may enter the folder, and the kernel's credentials of each
connection are compared. A pause between two connections bounds the part of the loop's time that a program can take.
While none connects the loop has one descriptor more, and nothing to do.

The folder of the sockets is ``/tmp/rrfp-UID``, however the job was started: the folder of a login session is another
one under ssh or a batch system, and vanishes at logout. The environment variable ``RRFP_TOP`` names another one, or is
``0`` for none.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import stat
import time
import weakref
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2s
from pathlib import Path
from typing import Any, TypeVar

from rrfp import timeouts
from rrfp.errors import ConfigError, ProtocolError, RrfpError
from rrfp.host import KNOWS_USERS, peer_credentials
from rrfp.log import get_logger
from rrfp.runtime import records
from rrfp.runtime.stall.status import JobStatus

logger = get_logger(__name__)

T = TypeVar("T")

VARIABLE = "RRFP_TOP"

#: Characters of a command line in a list of jobs.
_COMMAND_LENGTH = 60

#: Programs that are answered at a time; as many others wait in the socket's backlog.
MOST_READERS = 4

#: A longer line is no report.
MOST_BYTES = 1 << 20

_NAME = re.compile(r"([0-9a-f]{12})\.(\d+)\.(\d+)\.sock")


@dataclass(frozen=True, slots=True, order=True)
class SocketFile:
    """A socket of one process."""

    #: The same on all ranks of a job, and on no other job's.
    job: str
    #: The lowest of the process.
    rank: int
    pid: int
    path: Path

    @classmethod
    def of(cls, folder: Path, job: str, rank: int) -> SocketFile:
        """That of this process; ``job`` may be any text."""
        digest = blake2s(job.encode(), digest_size=6).hexdigest()
        pid = os.getpid()
        return cls(digest, rank, pid, folder / f"{digest}.{rank}.{pid}.sock")

    @classmethod
    def read(cls, path: Path) -> SocketFile | None:
        """The socket at ``path``; None where that is not a name of one."""
        match = _NAME.fullmatch(path.name)
        return None if match is None else cls(match[1], int(match[2]), int(match[3]), path)

    def has_listener(self) -> bool:
        """Whether a process listens there. Never waits."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.setblocking(False)
            try:
                sock.connect(os.fspath(self.path))
            except (ConnectionRefusedError, FileNotFoundError):
                return False
            except OSError:  # it has no room for another connection
                return True
        return True

    def remove(self) -> None:
        with suppress(OSError):
            self.path.unlink()

    def remove_own(self) -> None:
        """Remove the file of this process; not that of the one from which it was forked."""
        if self.pid == os.getpid():
            self.remove()


def chosen_folder() -> Path | None:
    """This user's folder; None where sockets are turned off."""
    value = os.environ.get(VARIABLE, "")
    if value == "0":
        return None
    if value and not os.path.isabs(value):
        raise ConfigError(f"{VARIABLE} is {value!r}, must be 0 (no sockets) or the absolute path of a folder")
    return Path(value or f"/tmp/rrfp-{os.geteuid()}")


def make_folder(folder: Path) -> None:
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    check_folder(folder)


def check_folder(folder: Path) -> None:
    """Refuse a folder to which another user has access."""
    state = folder.lstat()
    if not stat.S_ISDIR(state.st_mode):
        raise NotADirectoryError(f"{folder} is not a folder")
    if state.st_uid != os.geteuid():
        raise PermissionError(f"{folder} belongs to user {state.st_uid}, must belong to {os.geteuid()}")
    if state.st_mode & 0o077:
        raise PermissionError(f"{folder} has mode {stat.S_IMODE(state.st_mode):o}, must have 700")


def sockets_in(folder: Path) -> list[SocketFile]:
    """The sockets in ``folder``, by job and rank; those of ended processes are removed."""
    try:
        check_folder(folder)
    except FileNotFoundError:
        return []
    files = sorted(file for path in folder.iterdir() if (file := SocketFile.read(path)) is not None)
    return [file for file in files if not _is_stale(file)]


def _is_stale(file: SocketFile) -> bool:
    """Whether its process has ended; removes it then. A process in another pid namespace is not in /proc."""
    if os.path.exists(f"/proc/{file.pid}") or file.has_listener():
        return False
    file.remove()
    return True


@dataclass(frozen=True, slots=True)
class JobReport:
    """A job at one moment, or why there is nothing to report."""

    pid: int
    #: Stages and method, for people.
    pipeline: str
    #: Of all ranks; None where the process refuses the reader, or has given up.
    survey: JobStatus | None = None
    #: Why.
    failure: str = ""

    def line(self) -> bytes:
        """As one line of JSON; of a job so large that it would be longer than `MOST_BYTES` without the stacks."""
        line = json.dumps(records.to_plain(self)).encode() + b"\n"
        if len(line) <= MOST_BYTES or self.survey is None:
            return line
        answers = tuple(
            answer if answer.status is None else replace(answer, status=replace(answer.status, stack=""))
            for answer in self.survey.answers
        )
        without = replace(self, survey=replace(self.survey, answers=answers))
        return json.dumps(records.to_plain(without)).encode() + b"\n"

    @classmethod
    def read(cls, line: bytes) -> JobReport:
        if len(line) > MOST_BYTES:
            raise ProtocolError(f"the line of a status socket cannot be read: it has more than {MOST_BYTES} bytes")
        try:
            plain = json.loads(line)
        except RecursionError:
            raise ProtocolError("the line of a status socket cannot be read: it is nested too deeply") from None
        except ValueError as error:
            raise ProtocolError(f"the line of a status socket cannot be read: {error}") from None
        report = records.from_plain(cls, plain, "the line of a status socket")
        if (survey := report.survey) is not None and survey.asker not in range(len(survey.answers)):
            raise ProtocolError(
                f"the line of a status socket cannot be read: asker is {survey.asker}, of {len(survey.answers)} ranks"
            )
        return report


class StatusServer:
    """Serves one process. Used on one loop only."""

    def __init__(self, folder: Path, job: str, rank: int, report: Callable[[], Awaitable[JobReport]]) -> None:
        self.file = SocketFile.of(folder, job, rank)
        self._report = report
        self._socks: set[socket.socket] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        #: The answer that is being made, or the last one.
        self._answer: asyncio.Task[bytes] | None = None
        self._remove = weakref.finalize(self, self.file.remove_own)  # also where the program ends without leaving
        _servers.add(self)

    def start(self) -> None:
        """Listen, and remove what killed processes have left."""
        if not KNOWS_USERS:
            raise OSError("this system does not tell the user at the other end of a socket")
        folder = self.file.path.parent
        make_folder(folder)
        sockets_in(folder)
        listener = socket.socket(socket.AF_UNIX)
        self._socks.add(listener)
        try:
            listener.setblocking(False)
            # A file under the last name has a listener from the first moment: it is never taken for a stale one.
            unready = folder / f".{self.file.path.name}"
            unready.unlink(missing_ok=True)
            listener.bind(os.fspath(unready))
            listener.listen(MOST_READERS)
            unready.rename(self.file.path)
        except BaseException:
            self._end(listener)
            raise
        self._spawn(self._accept(listener))

    async def close(self) -> None:
        """Stop, and remove the file. May be called twice."""
        self._remove()
        if running := list(self._tasks):
            for task in running:
                task.cancel()
            await asyncio.wait(running)
        for sock in list(self._socks):  # of tasks that had not begun
            self._end(sock)

    def forget(self) -> None:
        """In a forked child: the connections are the parent's, and must end with it."""
        for sock in self._socks:
            with suppress(OSError):
                os.close(sock.detach())

    async def _accept(self, listener: socket.socket) -> None:
        loop, free = asyncio.get_running_loop(), asyncio.Semaphore(MOST_READERS)
        try:
            while True:
                await free.acquire()
                try:
                    sock, _ = await loop.sock_accept(listener)
                except OSError:  # no descriptor is left, for example
                    free.release()
                else:
                    self._socks.add(sock)
                    self._spawn(self._serve(sock)).add_done_callback(lambda _: free.release())
                await asyncio.sleep(timeouts.STATUS_PAUSE_S)
        finally:
            self._end(listener)

    async def _serve(self, sock: socket.socket) -> None:
        try:
            sock.setblocking(False)
            async with asyncio.timeout(timeouts.STATUS_S):
                line = _refusal(sock) or await self._line()
            async with asyncio.timeout(timeouts.STATUS_READ_S):
                await asyncio.get_running_loop().sock_sendall(sock, line)
        except (OSError, TimeoutError):  # the program has ended, or does not read
            pass
        except Exception as error:  # a look must not end the job, whatever the code plugged into it does
            logger.warning("the status of the job could not be reported: %r", error)
        finally:
            self._end(sock)

    async def _line(self) -> bytes:
        """The answer; programs that connect while it is being made get the same one."""
        if self._answer is None or self._answer.done():
            self._answer = self._spawn(self._make())
        return await asyncio.shield(self._answer)

    async def _make(self) -> bytes:
        return (await self._report()).line()

    def _spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(coroutine, name="rrfp-status")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _end(self, sock: socket.socket) -> None:
        self._socks.discard(sock)
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()


def _refusal(sock: socket.socket) -> bytes:
    """The line for a program of another user; empty for this one's."""
    _, user = peer_credentials(sock)
    if user == os.geteuid():
        return b""
    return JobReport(os.getpid(), "", failure=f"user {user} may not look at a job of user {os.geteuid()}").line()


_servers: weakref.WeakSet[StatusServer] = weakref.WeakSet()


def _forget_all() -> None:
    for server in list(_servers):
        server.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


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


class JobEnded(Exception):
    """No process of the job listens any more."""


class SilentJobError(RrfpError):
    """Processes of the job listen, and none answers."""


class RunningJob:
    """One job, by the sockets of its processes on this host: where one is silent or has ended, it asks the next."""

    def __init__(self, files: Iterable[SocketFile]) -> None:
        self._files = list(files)

    @property
    def pids(self) -> list[int]:
        return [file.pid for file in self._files]

    @property
    def path(self) -> Path:
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


def find_job(wanted: str | None) -> RunningJob:
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
    jobs = [job for job in map(RunningJob, by_job.values()) if job.is_alive()]
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


def _at(path: Path) -> RunningJob:
    file = SocketFile.read(path.absolute())
    if file is None or not path.is_socket():
        raise ConfigError(f"job is {str(path)!r}, must be the id of a process or the path of its status socket")
    job = RunningJob([file])
    if not job.is_alive():
        raise RrfpError(f"{path}: its process has ended")
    return job
