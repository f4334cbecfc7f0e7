"""``rrfp demo``: trains a small GPT across real processes, fixed order beside readiness-driven dispatch."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from rrfp import timeouts
from rrfp.errors import ConfigError, RrfpError
from rrfp.lab.demo.report import PAGE, DemoReport, Steps
from rrfp.lab.demo.settings import SEQUENCE_LENGTH, DemoSettings
from rrfp.lab.demo.text import load_text
from rrfp.lab.report.page import require_library
from rrfp.lab.traces.pictures import require_matplotlib
from rrfp.tables import terminal


class DemoFailedError(RrfpError):
    """A worker failed, or torchrun was killed."""


#: What rank 0 prints, line by line.
Lines = Iterator[Mapping[str, Any]]


def run_workers(settings: DemoSettings, log: Path) -> Lines:
    """Yield each line of rank 0; leaves no process behind, whatever the end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(settings.stages)]
    command += ["--monitor-interval", str(timeouts.MONITOR_S)]
    command += ["-m", "rrfp.lab.demo.worker", settings.to_json()]
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
    """Ends the workers soon after a failure, whether torchrun reacts or not."""

    # torchrun by itself waits 30 s for a stopped worker, and leaves its workers running when it is killed.

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.pids: set[int] = set()
        #: Set when a worker has reported a failure.
        self.failed = threading.Event()
        self._process = process
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rrfp-demo-reaper", daemon=True)
        self._thread.start()

    def end(self) -> None:
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


def run_demo(settings: DemoSettings, *, as_json: bool) -> None:
    load_text(settings.text, at_least=SEQUENCE_LENGTH + 1)
    out = _prepare(settings)
    has_picture, has_page = _can(require_matplotlib, "timeline.png"), _can(require_library, PAGE)
    steps = Steps(settings)
    try:
        for line in _with_progress(settings, out, quiet=as_json):
            steps.add(line)
        report = DemoReport(settings, steps)
        names = report.write(has_picture=has_picture, has_page=has_page)
    finally:
        shutil.rmtree(out / "parts", ignore_errors=True)
    if as_json:
        sys.stdout.write(json.dumps(report.to_json()) + "\n")
        return
    report.show()
    console = terminal()
    console.print(f"written to {out}/: {', '.join(names)}")
    if has_page:
        shows = "a fixed order and a readiness-driven one, task by task"
        console.print(f"open {out / PAGE} in a browser: {shows}", soft_wrap=True)
    console.print("the traces open in https://ui.perfetto.dev")


def _can(require: Callable[[], None], name: str) -> bool:
    """Whether a file can be made; one line says why not."""
    try:
        require()
    except ConfigError as error:
        _report(f"{name} is left out: {error}")
        return False
    return True


def _report(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _prepare(settings: DemoSettings) -> Path:
    out = Path(settings.out)
    try:
        shutil.rmtree(out / "parts", ignore_errors=True)
        (out / "parts").mkdir(parents=True)
        for stale in (out / "summary.json", out / "timeline.png", out / PAGE, *out.glob("trace-*.json")):
            stale.unlink(missing_ok=True)  # or old files would look like the result of a run that failed
    except OSError as error:
        raise ConfigError(f"out {out}: cannot be written ({error.strerror})") from None
    return out


def _with_progress(settings: DemoSettings, out: Path, *, quiet: bool) -> Lines:
    lines = run_workers(settings, out / "workers.log")
    console = Console(stderr=True)
    if console.is_terminal:
        return _with_bar(settings, console, lines)
    return lines if quiet else _with_lines(settings, lines)


def _with_bar(settings: DemoSettings, console: Console, lines: Lines) -> Lines:
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        total = len(settings.methods) * (settings.warm_up + settings.steps)
        bar = progress.add_task(f"starting {settings.stages} processes", total=total)
        for line in lines:
            progress.update(bar, advance=1, description=f"{line['method']}: {line['seconds'] * 1e3:.0f} ms a step")
            yield line


def _with_lines(settings: DemoSettings, lines: Lines) -> Lines:
    """A line when the processes start, and one for each step."""
    methods, steps = len(settings.methods), settings.warm_up + settings.steps
    _report(f"starting {settings.stages} processes: {methods} methods take turns for {steps} steps each")
    times: list[str] = []
    for line in lines:
        times.append(f"{line['method']} {line['seconds'] * 1e3:.0f} ms")
        if len(times) == methods:
            kind = " (warm-up)" if line["step"] < settings.warm_up else ""
            _report(f"step {line['step'] + 1} of {steps}{kind}: {', '.join(times)}")
            times.clear()
        yield line
