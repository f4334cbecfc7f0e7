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
from rrfp.demo.settings import METHODS, SEQUENCE_LENGTH, DemoSettings
from rrfp.demo.summary import Steps
from rrfp.demo.text import load_text
from rrfp.errors import ConfigError
from rrfp.trace.plot import require_matplotlib


def run_demo(settings: DemoSettings, *, as_json: bool) -> None:
    """Run the demo and print its table, or its JSON.

    Raises:
        ConfigError: before any process starts, if matplotlib, the text or the folder is missing.
        DemoFailedError: if a worker failed.
    """
    require_matplotlib()
    load_text(settings.text, at_least=SEQUENCE_LENGTH + 1)
    out = _prepare(settings)
    steps = Steps(settings)
    try:
        for line in _with_progress(settings, out):
            steps.add(line)
        report = DemoReport(settings, steps)
        report.write()
    finally:
        shutil.rmtree(out / "parts", ignore_errors=True)
    if as_json:
        sys.stdout.write(json.dumps(report.to_json()) + "\n")
        return
    console = Console()
    console.print(report.table())
    console.print(f"written to {out}/: summary.json, timeline.png, {', '.join(f'trace-{m}.json' for m in METHODS)}")
    console.print("the traces open in https://ui.perfetto.dev")


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


def _with_progress(settings: DemoSettings, out: Path) -> Iterator[Mapping[str, Any]]:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        total = len(METHODS) * (settings.warm_up + settings.steps)
        bar = progress.add_task(f"starting {settings.stages} processes", total=total)
        for line in run_workers(settings, out / "workers.log"):
            progress.update(bar, advance=1, description=f"{line['method']}: {line['seconds'] * 1e3:.0f} ms a step")
            yield line
