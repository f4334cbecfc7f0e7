"""Processes of a benchmark: their environment, and workers under torchrun that report in lines of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

#: Where the package `benchmarks` lies.
_ROOT = Path(__file__).resolve().parents[2]


def environment_with(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process with one thread, which finds the benchmarks' modules."""
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **variables}


def run_workers(
    script: Path,
    count: int,
    *arguments: str,
    awaited: Callable[[], str] = lambda: "a report",
    patience: float = threading.TIMEOUT_MAX,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Any]:
    """Run ``count`` workers, and yield their reports.

    Args:
        script: the worker's file.
        count: how many.
        arguments: of each, on its command line.
        awaited: what the next report is about, for the error.
        patience: seconds within which each report must come; by default any number.
        variables: of the environment.

    Raises:
        SystemExit: if a worker failed, or none reported for too long; the message says what was awaited.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    process = subprocess.Popen(
        [*command, str(script), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=environment_with(variables),
    )
    assert process.stdout is not None
    try:
        is_late = yield from _reports(process, process.stdout, patience)
        if is_late:
            raise SystemExit(f"no worker reported for {patience:g} s: waited for {awaited()}")
        if process.wait() != 0:
            raise SystemExit(f"a worker ended with exit code {process.returncode}: waited for {awaited()}")
    finally:
        process.terminate()  # torchrun ends its workers
        process.wait()
        process.stdout.close()


def _reports(process: subprocess.Popen[str], lines: Iterable[str], patience: float) -> Generator[Any, None, bool]:
    """Yield the reports until the workers have ended, or are ended because one takes too long; returns whether."""
    late = threading.Event()

    def give_up() -> None:
        late.set()
        process.terminate()

    def watch() -> threading.Timer:
        timer = threading.Timer(patience, give_up)
        timer.daemon = True
        timer.start()
        return timer

    timer = watch()
    try:
        for text in lines:
            if text.startswith("{"):
                timer.cancel()  # whoever reads the report may take their time
                yield json.loads(text)
                timer = watch()
    finally:
        timer.cancel()
    return late.is_set()
