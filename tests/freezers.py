"""Cgroups that freeze processes, as a paused container does. Skips where this machine permits none."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rrfp.transports.shm.liveness import _mounts

#: Of each version of cgroups: the key of its mount, the file to write to, what freezes and what thaws, and the file and
#: its line that say that all is frozen.
_FILES = {
    "v1": ("freezer", "freezer.state", "FROZEN", "THAWED", "freezer.state", "FROZEN"),
    "v2": ("", "cgroup.freeze", "1", "0", "cgroup.events", "frozen 1"),
}

VERSIONS = tuple(_FILES)


class Freezer:
    """A cgroup of a test's own."""

    def __init__(self, folder: Path, version: str) -> None:
        self._folder = folder
        _, self._to, self._freeze, self._thaw, self._says, self._frozen = _FILES[version]

    def take(self, pid: int) -> None:
        """Put a process into it."""
        (self._folder / "cgroup.procs").write_text(str(pid))

    def freeze(self) -> None:
        """Returns once all its processes are frozen."""
        (self._folder / self._to).write_text(self._freeze)
        until = time.monotonic() + 10
        while self._frozen not in (self._folder / self._says).read_text().splitlines():
            assert time.monotonic() < until, "nothing was frozen"
            time.sleep(0.005)

    def thaw(self) -> None:
        """Let its processes go on."""
        (self._folder / self._to).write_text(self._thaw)


@contextmanager
def freezer(version: str) -> Iterator[Freezer]:
    """A cgroup that is thawed in the end, and removed; its processes go back."""
    mount = _mounts().get(_FILES[version][0])
    if mount is None:
        pytest.skip(f"no cgroups of {version} are mounted that freeze")
    folder = Path(mount[1], f"rrfp-test-{os.getpid()}-{time.monotonic_ns()}")
    try:
        folder.mkdir()
        (folder / _FILES[version][1]).write_text(_FILES[version][3])
    except OSError as error:
        pytest.skip(f"no cgroup can be made: {error}")
    try:
        yield Freezer(folder, version)
    finally:
        (folder / _FILES[version][1]).write_text(_FILES[version][3])
        for pid in (folder / "cgroup.procs").read_text().split():
            (folder.parent / "cgroup.procs").write_text(pid)
        until = time.monotonic() + 10
        while (folder / "cgroup.procs").read_text() and time.monotonic() < until:
            time.sleep(0.01)
        folder.rmdir()
