"""The runs of a comparison, one set of processes for each: their steps, with a bar that shows how far they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import Progress

from benchmarks.shared.comparison import Comparison, Turn
from benchmarks.shared.steps import Step
from benchmarks.shared.workers import run_workers

#: Seconds without a report after which workers count as hung: their start takes less, and a step far less.
_PATIENCE_S = 180.0

S = TypeVar("S", bound=Comparison)


def steps_measured(
    worker: Path,
    every: Sequence[S],
    keep: Callable[[Any], object] = lambda line: None,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[tuple[S, list[Step]]]:
    """Run ``worker``, which takes its settings as JSON, for each of ``every``.

    Args:
        worker: the worker's file.
        every: one for each set of processes.
        keep: is given the report of every step as soon as it is there.
        variables: of the processes' environment.

    Raises:
        SystemExit: if a worker failed or hangs; the message says which step was awaited.
    """
    with Progress(console=Console(stderr=True), transient=True, auto_refresh=False) as progress:
        done = progress.add_task("steps", total=sum(1 for settings in every for _ in settings.turns()))
        for settings in every:
            turns, steps = [*settings.turns(), None], list[Step]()

            def awaited(turns: Sequence[Turn | None] = turns, steps: Sequence[Step] = steps) -> str:
                turn = turns[len(steps)]
                return "the ranks' end" if turn is None else f"{turn.method}, {turn.cell}, round {turn.number}"

            progress.update(done, description=awaited(), refresh=True)
            plain = settings.to_json()
            options: Any = {"awaited": awaited, "patience": _PATIENCE_S, "variables": variables}
            for line in run_workers(worker, settings.stages, plain, **options):
                keep(line)
                steps.append(Step.of(line, settings.METHODS))
                progress.update(done, advance=1, description=awaited(), refresh=True)
            yield settings, steps
