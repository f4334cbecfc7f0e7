"""Many simulated runs: workloads by methods by seeds, over several processes, a tidy row for each.

`sweep` is what ``rrfp simulate`` does with lists, for use from Python:

    cells = [Cell(workload, method) for workload in workloads for method in methods]
    result = sweep(cells)

It runs cells and makes rows of them; spreads, tables and pictures of rows are made elsewhere.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from types import TracebackType

from rrfp.costs.streams import whole
from rrfp.errors import ConfigError
from rrfp.sim.simulation import Simulation
from rrfp.sim.sweep.experiment import Cell
from rrfp.sim.sweep.workers import in_order, no_interrupt, usable_cores


@dataclass(frozen=True, slots=True)
class Row:
    """What came of one run: the columns of the CSV file, in order.

    Attributes:
        profile, stages, microbatches, chunks, placement, split: the workload's.
        method: the method's name.
        kind: ``hint`` or ``strict``.
        limit, admission: of a hint, else None.
        sends: ``eager`` or ``blocking``.
        jitter, latency, seed: the workload's.
        makespan: seconds.
        lower_bound: seconds that no method which holds as much can beat.
        ratio: makespan / lower_bound.
        peak_max: the largest D of any stage, in chunk tasks.
        received_peak_max: the most inputs received and not yet used on any stage.
        busy_share: the part of stages x makespan that lanes computed.
        digest: of the cost table; equal digests, equal tables.
    """

    profile: str
    stages: int
    microbatches: int
    chunks: int
    placement: str
    split: bool
    method: str
    kind: str
    limit: str | None
    admission: str | None
    sends: str
    jitter: str
    latency: str
    seed: int
    makespan: float
    lower_bound: float
    ratio: float
    peak_max: int
    received_peak_max: int
    busy_share: float
    digest: str

    @classmethod
    def of(cls, cell: Cell, simulation: Simulation) -> Row:
        """The row of a run that was made."""
        workload, method = cell.workload, cell.method
        is_hint = method.kind == "hint"
        time = workload.stages * simulation.makespan
        return cls(
            profile=workload.profile,
            stages=workload.stages,
            microbatches=workload.microbatches,
            chunks=workload.chunks,
            placement=workload.placement,
            split=workload.split,
            method=method.name,
            kind=method.kind,
            limit=str(method.limit) if is_hint else None,
            admission=method.admission if is_hint else None,
            sends=method.sends,
            jitter=workload.jitter,
            latency=workload.latency,
            seed=workload.seed,
            makespan=simulation.makespan,
            lower_bound=simulation.lower_bound,
            ratio=simulation.ratio,
            peak_max=max(peak.held for peak in simulation.peaks),
            received_peak_max=max(peak.received for peak in simulation.peaks),
            busy_share=sum(simulation.result.busy) / time if time else 0.0,
            digest=simulation.costs.digest(),
        )


#: The columns of a row, as the CSV file has them.
COLUMNS = tuple(field.name for field in fields(Row))


@dataclass(frozen=True, slots=True)
class Skip:
    """A run that was not made because its method does not fit its workload.

    Attributes:
        cell: the run.
        reason: what does not fit, in one line.
    """

    cell: Cell
    reason: str


@dataclass(frozen=True, slots=True)
class SweepResult:
    """What a sweep made, both in the order of its cells.

    Attributes:
        rows: a row a run.
        skipped: cells that do not fit.
    """

    rows: tuple[Row, ...]
    skipped: tuple[Skip, ...]


def sweep(
    cells: Sequence[Cell], *, jobs: int | None = None, progress: Callable[[Row | Skip], object] | None = None
) -> SweepResult:
    """Run every cell. The rows do not depend on ``jobs``.

    Args:
        cells: what to run. Let the cells of one workload follow each other: its cost table is made once.
        jobs: processes; None: one for every usable core. Each holds one run, about 1 KiB a task, at a time.
        progress: called with every outcome, in the order of the cells, as soon as it and all before it are known.

    Raises:
        ConfigError: if ``jobs`` is below 1.
        DeadlockError, HintError: as soon as a run deadlocks or its hint breaks its contract; the message names the run.
        WorkerLostError: if a process was killed.
    """
    jobs = usable_cores() if jobs is None else whole("jobs", jobs, 1)
    rows: list[Row] = []
    skipped: list[Skip] = []
    with closing(in_order(lambda place: _outcome(cells[place]), len(cells), jobs=jobs)) as outcomes:
        for cell, answer in zip(cells, outcomes, strict=True):
            outcome = Skip(cell, answer) if isinstance(answer, str) else answer
            if isinstance(outcome, Skip):
                skipped.append(outcome)
            else:
                rows.append(outcome)
            if progress is not None:
                progress(outcome)
    return SweepResult(tuple(rows), tuple(skipped))


def _outcome(cell: Cell) -> Row | str:
    """The row, or why there is none. A cell itself may not be picklable."""
    try:
        return Row.of(cell, cell.simulate())
    except ConfigError as error:  # its values are right each by itself: it is the combination
        return str(error)


class RowFile:
    """A CSV file of rows, complete up to the last row whatever happens after it. Use it as a context manager.

    Args:
        path: the file; what was there is replaced.

    Attributes:
        rows: how many are in it.

    Raises:
        ConfigError: if it cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            self._file = open(path, "w", encoding="utf-8", newline="")  # noqa: SIM115, closed by __exit__
        except OSError as error:
            raise ConfigError(f"{os.fspath(path)}: cannot be written ({error.strerror or error})") from None
        self.rows = 0
        self._writer = csv.writer(self._file, lineterminator="\n")
        self._write(COLUMNS)

    def add(self, row: Row) -> None:
        """Write one row through to the file. Numbers read back bitwise; None is empty, a bool is true or false."""
        with no_interrupt():
            self._write([_text(getattr(row, column)) for column in COLUMNS])
            self.rows += 1

    def _write(self, values: Sequence[str]) -> None:
        self._writer.writerow(values)
        self._file.flush()

    def __enter__(self) -> RowFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()


def _text(value: object) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)
