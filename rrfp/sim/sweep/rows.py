"""A run as a row of plain values, and the CSV file of rows."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from types import TracebackType

from rrfp.errors import ConfigError
from rrfp.sim.cluster.simulation import TensorParallelSimulation
from rrfp.sim.simulation import Simulation
from rrfp.sim.sweep.experiment import Experiment
from rrfp.sim.sweep.pool import no_interrupt


@dataclass(frozen=True, slots=True)
class Row:
    """The outcome of one run: the columns of the CSV file, in order.

    Attributes:
        costs: the workload's cost file; None for a profile.
        profile: the workload's; None for a cost file, as are jitter, latency and seed.
        stages, microbatches, chunks, placement, split: the cost table's.
        tp: ranks of a tensor-parallel group; None: single ranks.
        method: the method's name.
        kind: ``hint`` or ``strict``.
        limit, admission: of a hint, else None.
        sends: ``eager`` or ``blocking``.
        coordination: ``leader``, ``agreement`` or (of a strict schedule) ``independent``; None without tp.
        jitter, latency, seed: the workload's.
        makespan: seconds.
        lower_bound: seconds that no method which holds as much can beat.
        ratio: makespan / lower_bound.
        peak_max: the largest D of any stage, in chunk tasks.
        received_peak_max: the most inputs received and not yet used on any stage.
        busy_share: the part of stages x makespan that lanes computed.
        coordination_share: the part of the step that the mean stage lost to coordination; None without tp.
        failed_rounds_per_task, messages_per_task: see `rrfp.sim.cluster.result.TensorParallelResult`; None without tp.
        digest: of the cost table; equal digests, equal tables.
    """

    costs: str | None
    profile: str | None
    stages: int
    microbatches: int
    chunks: int
    placement: str
    split: bool
    tp: int | None
    method: str
    kind: str
    limit: str | None
    admission: str | None
    sends: str
    coordination: str | None
    jitter: str | None
    latency: str | None
    seed: int | None
    makespan: float
    lower_bound: float
    ratio: float
    peak_max: int
    received_peak_max: int
    busy_share: float
    coordination_share: float | None
    failed_rounds_per_task: float | None
    messages_per_task: float | None
    digest: str

    @classmethod
    def of(cls, experiment: Experiment, run: Simulation | TensorParallelSimulation) -> Row:
        """The row of a run that was made."""
        workload, method = experiment.workload, experiment.method
        groups = run if isinstance(run, TensorParallelSimulation) else None
        simulation = run if isinstance(run, Simulation) else run.simulation
        table, time = simulation.costs, simulation.costs.stages * simulation.makespan
        is_hint = method.kind == "hint"
        return cls(
            costs=getattr(workload, "costs_file", None),
            profile=getattr(workload, "profile", None),
            stages=table.stages,
            microbatches=table.microbatches,
            chunks=table.chunks,
            placement=table.placement,
            split=table.split,
            tp=workload.tp,
            method=method.name,
            kind=method.kind,
            limit=str(method.limit) if is_hint else None,
            admission=method.admission if is_hint else None,
            sends=method.sends,
            coordination=None if groups is None else type(groups.coordination).__name__.lower(),
            jitter=getattr(workload, "jitter", None),
            latency=getattr(workload, "latency", None),
            seed=getattr(workload, "seed", None),
            makespan=simulation.makespan,
            lower_bound=simulation.lower_bound,
            ratio=simulation.ratio,
            peak_max=max(peak.held for peak in simulation.peaks),
            received_peak_max=max(peak.received for peak in simulation.peaks),
            busy_share=sum(simulation.result.busy) / time if time else 0.0,
            coordination_share=None if groups is None else groups.result.coordination_share,
            failed_rounds_per_task=None if groups is None else groups.result.failed_rounds_per_task,
            messages_per_task=None if groups is None else groups.result.messages_per_task,
            digest=workload.costs().digest(),
        )


#: The columns of a row, as the CSV file has them.
COLUMNS = tuple(field.name for field in fields(Row))


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
