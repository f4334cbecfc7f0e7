"""``rrfp demo``: trains a small GPT across real processes, fixed order beside readiness-driven dispatch."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from rrfp.demo.launch import run_workers
from rrfp.demo.report import DemoReport
from rrfp.demo.settings import SEQUENCE_LENGTH, DemoSettings
from rrfp.demo.summary import Steps
from rrfp.demo.text import load_text
from rrfp.errors import ConfigError
from rrfp.tables import terminal
from rrfp.trace.plot import require_matplotlib


def run_demo(settings: DemoSettings, *, as_json: bool) -> None:
    """Run the demo and print its table, or its JSON.

    Raises:
        ConfigError: before any process starts, if the text or the folder is missing.
        DemoFailedError: if a worker failed.
    """
    load_text(settings.text, at_least=SEQUENCE_LENGTH + 1)
    out = _prepare(settings)
    has_picture = _can_draw()
    steps = Steps(settings)
    try:
        for line in _with_progress(settings, out, quiet=as_json):
            steps.add(line)
        report = DemoReport(settings, steps)
        names = report.write(has_picture=has_picture)
    finally:
        shutil.rmtree(out / "parts", ignore_errors=True)
    if as_json:
        sys.stdout.write(json.dumps(report.to_json()) + "\n")
        return
    report.show()
    console = terminal()
    console.print(f"written to {out}/: {', '.join(names)}")
    console.print("the traces open in https://ui.perfetto.dev")


def _can_draw() -> bool:
    """Whether there is a matplotlib; without it, one line says how to get it."""
    try:
        require_matplotlib()
    except ConfigError as error:
        _report(f"timeline.png is left out: {error}")
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
        for stale in (out / "summary.json", out / "timeline.png", *out.glob("trace-*.json")):
            stale.unlink(missing_ok=True)  # or old files would look like the result of a run that failed
    except OSError as error:
        raise ConfigError(f"out {out}: cannot be written ({error.strerror})") from None
    return out


def _with_progress(settings: DemoSettings, out: Path, *, quiet: bool) -> Iterator[Mapping[str, Any]]:
    """The lines of rank 0; a bar on a terminal's stderr, otherwise a line a step unless ``quiet``."""
    lines = run_workers(settings, out / "workers.log")
    console = Console(stderr=True)
    if console.is_terminal:
        return _with_bar(settings, console, lines)
    return lines if quiet else _with_lines(settings, lines)


def _with_bar(
    settings: DemoSettings, console: Console, lines: Iterator[Mapping[str, Any]]
) -> Iterator[Mapping[str, Any]]:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        total = len(settings.methods) * (settings.warm_up + settings.steps)
        bar = progress.add_task(f"starting {settings.stages} processes", total=total)
        for line in lines:
            progress.update(bar, advance=1, description=f"{line['method']}: {line['seconds'] * 1e3:.0f} ms a step")
            yield line


def _with_lines(settings: DemoSettings, lines: Iterator[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """A line when the processes start, and one for each step of all methods, which take turns."""
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
