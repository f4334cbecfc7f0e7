"""Processes of a benchmark: their environment, and workers under torchrun that report in lines of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

#: Where the package `benchmarks` lies.
_ROOT = Path(__file__).resolve().parents[2]


def environment_with(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process with one thread, which finds the benchmarks' modules."""
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **variables}


def run_workers(script: Path, count: int, *arguments: str, **variables: str) -> Iterator[Any]:
    """Run ``count`` workers, and yield their reports.

    Args:
        script: the worker's file.
        count: how many.
        arguments: of each, on its command line.
        variables: of the environment.

    Raises:
        SystemExit: if a worker failed.
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
        for text in process.stdout:
            if text.startswith("{"):
                yield json.loads(text)
        if process.wait() != 0:
            raise SystemExit(f"a worker ended with exit code {process.returncode}")
    finally:
        process.terminate()  # torchrun ends its workers
        process.wait()
        process.stdout.close()
