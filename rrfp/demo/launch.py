"""Starts the demo's workers under torchrun and reads the lines of rank 0."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rrfp.core import timeouts
from rrfp.demo.settings import DemoSettings
from rrfp.errors import RrfpError


class DemoFailedError(RrfpError):
    """A worker failed, or torchrun was killed."""


def run_workers(settings: DemoSettings, log: Path) -> Iterator[Mapping[str, Any]]:
    """Run the workers, and yield each line that rank 0 prints. Leaves no process behind, whatever the end.

    Args:
        settings: the run's.
        log: file for all other output of the workers.

    Raises:
        DemoFailedError: if a worker failed; names the origin, where known, and the log.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(settings.stages)]
    command += ["--monitor-interval", str(timeouts.MONITOR_S)]
    command += ["-m", "rrfp.demo.worker", settings.to_json()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    aborted = None
    with log.open("wb") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        assert process.stdout is not None
        reaper = _Reaper(process)
        try:
            for text in process.stdout:
                line = _parse(text)
                if line is None:
                    continue
                if line["event"] == "started":
                    reaper.pids.add(line["pid"])
                elif line["event"] == "aborted":
                    aborted = aborted or line["error"]
                    reaper.failed.set()
                else:
                    yield line
            code = process.wait()
        finally:
            reaper.end()
            process.stdout.close()
    if aborted or code:
        reason = f"torchrun was ended by signal {-code}" if code < 0 else "a worker failed"
        raise DemoFailedError(f"{aborted or reason}; log: {log}")


class _Reaper:
    """Ends the workers soon after a failure, whether torchrun and the workers react or not.

    torchrun by itself waits 30 s for a stopped worker, and leaves its workers running when it is killed.

    Args:
        process: torchrun.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        #: Process ids that the workers reported.
        self.pids: set[int] = set()
        #: Set when a worker has reported a failure.
        self.failed = threading.Event()
        self._process = process
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rrfp-demo-reaper", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End all processes that still run."""
        self._done.set()
        self._thread.join()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeouts.WORKERS_END_S)
            self._kill()
            self._process.wait()

    def _watch(self) -> None:
        while not self._done.wait(timeouts.WATCH_S):
            if self.failed.is_set() or self._process.poll() is not None:
                if not self._done.wait(timeouts.WORKERS_END_S):
                    self._kill()
                return

    def _kill(self) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)  # without workers it ends by itself
            self._process.kill()


def _parse(text: str) -> Mapping[str, Any] | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and "event" in line else None
