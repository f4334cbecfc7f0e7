"""The reports of measured steps in a folder, a file for each cell and a line for each step; a later run continues."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.peers.settings import METHODS
from benchmarks.shared.comparison import Cell
from benchmarks.shared.steps import Step


class RawSteps:
    """The folder.

    Args:
        folder: is made where it is missing.
        settings: what all steps have in common, as plain data.
        goes_on: whether the steps that are there stay; else they are removed.

    Raises:
        SystemExit: if the steps that stay were measured with other settings.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], *, goes_on: bool = True) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        head, text = folder / "settings.json", json.dumps(settings)
        if not goes_on:
            for old in (head, *folder.glob("pp*-*.jsonl")):
                old.unlink(missing_ok=True)
        if head.exists() and head.read_text() != text:
            raise SystemExit(
                f"{folder} has steps of other settings, {head.read_text()}: name another folder with --raw"
            )
        head.write_text(text)
        for file in folder.glob("pp*-*.jsonl"):
            if not file.read_bytes().endswith(b"\n"):
                with file.open("a") as cut_off:
                    cut_off.write("\n")

    def keep(self, report: Any) -> None:
        """Add the report of a step."""
        (stages, profile, jitter), number, _ = report["turn"]
        if number > 0:
            with self._file(Cell(stages, profile, jitter)).open("a") as file:
                file.write(json.dumps(report) + "\n")

    def steps(self, cell: Cell) -> Iterator[Step]:
        """The steps that are there; a line that was cut off by the end of its run counts as none."""
        file = self._file(cell)
        for line in file.read_text().splitlines() if file.exists() else ():
            try:
                report = json.loads(line)
            except ValueError:
                continue
            yield Step.of(report, METHODS)

    def lacking(self, cell: Cell, methods: tuple[str, ...], rounds: int) -> range:
        """The numbers of the rounds after which each method can have as many undisturbed steps."""
        last, undisturbed = 0, Counter[str]()
        for step in self.steps(cell):
            last = max(last, step.turn.number)
            undisturbed[step.turn.method] += not step.is_disturbed
        least = min(undisturbed[name] for name in methods if METHODS[name].runs(cell.profile))
        return range(last + 1, last + 1 + max(0, rounds - least))

    def days(self, cells: Iterable[Cell]) -> list[str]:
        """The days, in UTC, on which the last steps of these cells were measured."""
        times = [self._file(cell).stat().st_mtime for cell in cells]
        return sorted({f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d}" for time in times})

    def _file(self, cell: Cell) -> Path:
        return self.folder / f"pp{cell.stages}-{cell.profile}-{cell.jitter}.jsonl"
