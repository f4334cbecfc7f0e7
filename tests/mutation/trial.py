"""Runs tests on a copy of the tree in which one thing was changed.

A worker imports the heavy libraries once and forks for each trial; the child imports the changed package. Each worker
has a copy of its own, so the tree itself is never touched.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path

#: What a copy holds.
COPIED = ("rrfp", "tests", "examples", "benchmarks", "docs", "pyproject.toml", "Makefile", "README.md")

#: No plugin of pytest: it wants to import those itself.
_PRELOADED = ("torch", "numpy", "pytest", "uvloop", "zmq", "msgpack", "structlog")


#: Seconds for one test. All examples of a property test take more than its usual limit on a busy machine.
_TEST_TIMEOUT_S = 300


class Fate(StrEnum):
    """What became of a changed tree."""

    KILLED = "killed"
    TIMEOUT = "timeout"  # killed, too: the tests did not come to an end
    SURVIVED = "survived"
    UNTESTED = "untested"  # no test runs the line


def copy_tree(tree: Path, to: Path) -> Path:
    """A copy of what tests need, with its times, so that compiled files stay valid."""
    for name in COPIED:
        if (tree / name).is_dir():
            shutil.copytree(tree / name, to / name)
        elif (tree / name).exists():
            to.mkdir(parents=True, exist_ok=True)
            shutil.copy2(tree / name, to / name)
    return to


@contextmanager
def changed(file: Path, text: str) -> Iterator[None]:
    """``file`` says ``text`` inside the ``with`` block."""
    before, times = file.read_text(), file.stat()
    file.write_text(text)
    try:
        yield
    finally:
        file.write_text(before)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def run_tests(tree: Path, tests: Sequence[str], timeout_s: float) -> tuple[Fate, str]:
    """Ask tests until one fails.

    Args:
        tree: where they are run.
        tests: their names, as pytest takes them.
        timeout_s: seconds after which the tests are ended.

    Returns:
        What became of the tree, and the end of what pytest said.
    """
    options = ["-x", "-q", "--no-header", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist"]
    options += ["-o", f"timeout={_TEST_TIMEOUT_S}", "-o", "faulthandler_timeout=0"]
    return _fork(tree, ["pytest", *options, "--hypothesis-seed=0", "--hypothesis-profile=full", *tests], timeout_s)


def run_command(tree: Path, words: Sequence[str], timeout_s: float) -> tuple[Fate, str]:
    """Run ``rrfp`` with ``words`` until it ends."""
    return _fork(tree, ["rrfp", *words], timeout_s)


def _fork(tree: Path, command: list[str], timeout_s: float) -> tuple[Fate, str]:
    for name in _PRELOADED:
        with suppress(ImportError):
            __import__(name)
    said = tree / "said.txt"
    child = os.fork()
    if not child:
        _become(tree, command, said)
    status = _wait(child, time.monotonic() + timeout_s)
    with suppress(ProcessLookupError):  # what the tests started and left
        os.killpg(child, signal.SIGKILL)
    text = said.read_text(errors="replace")[-2000:]
    if status is None:
        os.waitpid(child, 0)
        return Fate.TIMEOUT, text
    return (Fate.SURVIVED if os.waitstatus_to_exitcode(status) == 0 else Fate.KILLED), text


def _wait(child: int, deadline: float) -> int | None:
    pause = 0.01
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(pause)
        pause = min(2 * pause, 0.2)
    return None


def _become(tree: Path, command: list[str], said: Path) -> None:
    """The child: never returns."""
    code = 70
    try:
        os.setpgid(0, 0)
        target = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(target, stream)
        os.chdir(tree)
        paths = [str(tree), str(tree / "tests")]
        sys.path[:] = [*paths, *(path for path in sys.path if path not in ("", *paths))]
        os.environ["PYTHONPATH"] = ":".join(paths)
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        sys.dont_write_bytecode = True
        for name in [name for name in sys.modules if name.split(".")[0] in ("rrfp", "mutation", "loop_guard")]:
            del sys.modules[name]
        code = _run(command)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(command: list[str]) -> int:
    if command[0] == "rrfp":
        from rrfp.cli import main

        sys.argv = command
        main()
        return 0
    import pytest

    return int(pytest.main(command[1:]))
