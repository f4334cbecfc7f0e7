"""The folder of status sockets, one for each user of a host, and the names of the sockets in it.

The folder is ``/tmp/rrfp-UID``, however the job was started: the folder of a login session is another one under ssh or
a batch system, and vanishes at logout. The environment variable ``RRFP_TOP`` names another one, or is ``0`` for none.
"""

from __future__ import annotations

import os
import re
import socket
import stat
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2s
from pathlib import Path

from rrfp.errors import ConfigError

VARIABLE = "RRFP_TOP"

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
        """Remove the file, if it is still there."""
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
