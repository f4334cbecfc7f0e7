"""Starts the demo's workers under torchrun and reads what rank 0 says."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rrfp.demo.settings import DemoSettings
from rrfp.errors import RrfpError

#: How long workers have to end after they were asked to, in seconds.
END_GRACE_S = 10.0


class DemoFailedError(RrfpError):
    """The workers did not get to the end."""


def run_workers(settings: DemoSettings, log: Path) -> Iterator[Mapping[str, Any]]:
    """Run the workers, and yield each line that rank 0 prints. Leaves no process behind, however it ends.

    Args:
        settings: the run's.
        log: file for everything else that the workers print.

    Raises:
        DemoFailedError: if a worker failed; names the origin where it is known, and the log.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(settings.stages)]
    command += ["-m", "rrfp.demo.worker", settings.to_json()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    aborted = None
    with log.open("wb") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        assert process.stdout is not None
        try:
            for text in process.stdout:
                line = _parse(text)
                if line is None:
                    continue
                if line["event"] == "aborted":
                    aborted = aborted or line["error"]
                else:
                    yield line
            code = process.wait()
        finally:
            _end(process)
            process.stdout.close()
    if code != 0:
        raise DemoFailedError(f"{aborted or f'a worker ended with exit code {code}'}; log: {log}")


def _parse(text: str) -> Mapping[str, Any] | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and "event" in line else None


def _end(process: subprocess.Popen[str]) -> None:
    """Make torchrun end its workers, and end it by force if it does not."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_GRACE_S)
        return
    process.kill()
    process.wait()
