"""The runs of a comparison, one set of processes for each: their steps, with a bar that shows how far they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress

from benchmarks.shared.comparison import Comparison
from benchmarks.shared.steps import Step
from benchmarks.shared.workers import run_workers

S = TypeVar("S", bound=Comparison)


def steps_measured(worker: Path, every: Sequence[S]) -> Iterator[tuple[S, list[Step]]]:
    """Run ``worker``, which takes its settings as JSON, for each of ``every``.

    Raises:
        SystemExit: if a worker failed.
    """
    with Progress(console=Console(stderr=True), transient=True, auto_refresh=False) as progress:
        done = progress.add_task("steps", total=sum(1 for settings in every for _ in settings.turns()))
        for settings in every:
            steps = []
            for line in run_workers(worker, settings.stages, settings.to_json()):
                steps.append(Step.of(line, settings.METHODS))
                progress.update(done, advance=1, refresh=True)
            yield settings, steps
