"""Workers of a benchmark under torchrun, which tell what they measured in lines of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def run_workers(script: str, count: int, settings: str, **environment: str) -> Iterator[Any]:
    """Run ``count`` workers, and yield what they tell.

    Args:
        script: the worker's file in this folder.
        count: how many.
        settings: what each gets as its argument.
        environment: variables beside one thread a process.

    Raises:
        SystemExit: if a worker failed.
    """
    worker = str(Path(__file__).with_name(script))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    process = subprocess.Popen(
        [*command, worker, settings],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
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
