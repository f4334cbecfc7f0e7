"""A run as a row of plain values, and the CSV file of rows."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from types import TracebackType

from rrfp.core.usage import WaitCause
from rrfp.errors import ConfigError
from rrfp.lab.cluster.simulation import TensorParallelSimulation
from rrfp.lab.simulation import Simulation
from rrfp.lab.sweep.experiment import Experiment
from rrfp.lab.sweep.pool import no_interrupt


@dataclass(frozen=True, slots=True)
class SweepRow:
    """The outcome of one run: the columns of the CSV file, in order."""

    #: The workload's cost file; None for a profile.
    costs: str | None
    #: The workload's; None for a cost file, as are jitter, latency and seed.
    profile: str | None
    #: stages, microbatches, chunks, placement, split: the cost table's.
    stages: int
    microbatches: int
    chunks: int
    placement: str
    split: bool
    #: Ranks of a tensor-parallel group; None: single ranks.
    tp: int | None
    #: The method's name.
    method: str
    #: ``hint`` or ``strict``.
    kind: str
    #: limit, admission: of a hint, else None.
    limit: str | None
    admission: str | None
    #: ``eager`` or ``blocking``.
    sends: str
    #: ``leader``, ``agreement`` or (of a strict schedule) ``independent``; None without tp.
    coordination: str | None
    #: jitter, latency, seed: the workload's.
    jitter: str | None
    latency: str | None
    seed: int | None
    #: Seconds.
    makespan: float
    #: Seconds that no method which holds as much can beat.
    lower_bound: float
    #: Makespan / lower_bound.
    ratio: float
    #: The largest D of any stage, in chunk tasks.
    peak_max: int
    #: The most inputs received and not yet used on any stage.
    received_peak_max: int
    #: The part of stages x makespan that lanes computed.
    busy_share: float
    #: The part of the step that the mean stage lost to coordination; None without tp.
    coordination_share: float | None
    #: failed_rounds_per_task, messages_per_task: see `rrfp.lab.cluster.result.TensorParallelResult`; None without tp.
    failed_rounds_per_task: float | None
    messages_per_task: float | None
    #: Of the cost table; equal digests, equal tables.
    digest: str
    #: Of microbatches, for a hint that wants them: ``own`` (of the profile or the cost file), ``planned`` (sums of the
    #: file's times), a file's name, or ``none``. None for all other methods.
    sizes: str | None = None
    #: The part of the makespan in which a stage had nothing to run because the limit held its forwards back: of the
    #: stage where it is largest.
    memory_wait_share: float = 0.0
    #: That stage; None where no stage waited so.
    memory_wait_stage: int | None = None
    #: Of microbatches: ``free`` or ``natural``; None for a strict schedule.
    order: str | None = None

    @classmethod
    def of(cls, experiment: Experiment, run: Simulation | TensorParallelSimulation) -> SweepRow:
        """The row of a run that was made."""
        workload, method = experiment.workload, experiment.method
        groups = run if isinstance(run, TensorParallelSimulation) else None
        simulation = run if isinstance(run, Simulation) else run.simulation
        table, time = simulation.costs, simulation.costs.stages * simulation.makespan
        is_hint = method.kind == "hint"
        memory_waits = [0.0] * table.stages
        for wait in simulation.result.waits:
            if wait.cause is WaitCause.MEMORY:
                memory_waits[wait.stage] += wait.end - wait.start
        longest = max(memory_waits)
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
            sizes=_source_of_sizes(experiment),
            memory_wait_share=longest / simulation.makespan if longest else 0.0,
            memory_wait_stage=memory_waits.index(longest) if longest else None,
            order=method.order if is_hint else None,
        )


#: The columns of a row, as the CSV file has them.
COLUMNS = tuple(field.name for field in fields(SweepRow))


class SweepFile:
    """A CSV file of rows, complete up to the last row whatever happens after it. Use it as a context manager."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            self._file = open(path, "w", encoding="utf-8", newline="")  # noqa: SIM115, closed by __exit__
        except OSError as error:
            raise ConfigError(f"{os.fspath(path)}: cannot be written ({error.strerror or error})") from None
        self.rows = 0
        self._writer = csv.writer(self._file, lineterminator="\n")
        self._write(COLUMNS)

    def add(self, row: SweepRow) -> None:
        """Write one row through to the file. Numbers read back bitwise; None is empty, a bool is true or false."""
        with no_interrupt():
            self._write([_text(getattr(row, column)) for column in COLUMNS])
            self.rows += 1

    def _write(self, values: Sequence[str]) -> None:
        self._writer.writerow(values)
        self._file.flush()

    def __enter__(self) -> SweepFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()


def _source_of_sizes(experiment: Experiment) -> str | None:
    workload = experiment.workload
    if not experiment.method.wants_sizes:
        return None
    return getattr(workload, "sizes_from", None) or ("none" if workload.sizes() is None else "own")


def _text(value: object) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)
