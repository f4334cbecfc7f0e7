"""Many simulated runs: workloads by methods by seeds, over several processes, a tidy row for each.

`sweep` is `rrfp sweep` from Python:

    experiments = [Experiment(workload, method) for workload in workloads for method in methods]
    result = sweep(experiments)

It runs experiments and makes rows of them; spreads, tables and pictures of rows are made elsewhere.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from rrfp.core.usage import WaitCause
from rrfp.errors import ConfigError, DeadlockError, HintError
from rrfp.lab.cluster.simulation import TensorParallelSimulation
from rrfp.lab.simulation import Simulation
from rrfp.lab.sweep.experiment import Experiment
from rrfp.lab.sweep.pool import no_interrupt, run_all, usable_cores
from rrfp.plain import whole


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
    #: Of its groups, see `rrfp.lab.cluster.simulation.TensorParallelResult`; None without tp.
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
        shape: dict[str, Any] = {
            name: getattr(table, name) for name in ("stages", "microbatches", "chunks", "placement", "split")
        }
        drawn: dict[str, Any] = {
            name: getattr(workload, name, None) for name in ("profile", "jitter", "latency", "seed")
        }
        times: dict[str, Any] = {name: getattr(simulation, name) for name in ("makespan", "lower_bound", "ratio")}
        return cls(
            **shape,
            **drawn,
            **times,
            costs=getattr(workload, "costs_file", None),
            tp=workload.tp,
            method=method.name,
            kind=method.kind,
            limit=str(method.limit) if is_hint else None,
            admission=method.admission if is_hint else None,
            sends=method.sends,
            coordination=None if groups is None else type(groups.coordination).__name__.lower(),
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
    """A CSV file of rows, always complete up to the last one. The first row replaces what the file had before."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._is_new = not os.path.lexists(path)
        try:
            self._file = open(path, "a", encoding="utf-8", newline="")  # noqa: SIM115, closed by __exit__
        except OSError as error:
            raise ConfigError(f"{os.fspath(path)}: cannot be written ({error.strerror or error})") from None
        self.rows = 0
        self._writer = csv.writer(self._file, lineterminator="\n")

    def add(self, row: SweepRow) -> None:
        """Write one row through to the file; numbers read back bitwise."""
        with no_interrupt():
            if self.rows == 0:
                if Path(self._file.name).is_file():
                    os.truncate(self._file.fileno(), 0)
                self._write(COLUMNS)
            self._write([text_of(getattr(row, column)) for column in COLUMNS])
            self.rows += 1

    def _write(self, values: Sequence[str]) -> None:
        whole = os.fstat(self._file.fileno()).st_size
        try:
            self._writer.writerow(values)
            self._file.flush()
        except OSError as error:
            with suppress(OSError):  # what is left to write
                self._file.close()
            if (path := Path(self._file.name)).is_file():  # whole rows stay
                os.truncate(path, whole) if whole else path.unlink()
            raise ConfigError(f"{self._file.name}: cannot be written ({error.strerror or error})") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if self.rows == 0 and self._is_new:
            Path(self._file.name).unlink(missing_ok=True)


def _source_of_sizes(experiment: Experiment) -> str | None:
    workload = experiment.workload
    if not experiment.method.wants_sizes:
        return None
    return getattr(workload, "sizes_from", None) or ("none" if workload.sizes() is None else "own")


def text_of(value: object) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


#: Simulated tasks that take about as long as starting two processes, which is a second.
TASKS_WORTH_A_PROCESS = 100_000


@dataclass(frozen=True, slots=True)
class Skip:
    """A run that was not made: its method does not fit."""

    experiment: Experiment
    #: What does not fit, in one line.
    reason: str


@dataclass(frozen=True, slots=True)
class SweepResult:
    """The outcomes of a sweep, both in the order of its experiments."""

    rows: tuple[SweepRow, ...]
    #: Experiments that do not fit.
    skipped: tuple[Skip, ...]


def sweep(
    experiments: Sequence[Experiment],
    *,
    jobs: int | None = None,
    progress: Callable[[SweepRow | Skip], object] | None = None,
) -> SweepResult:
    """Run every experiment. The rows do not depend on ``jobs``.

    Args:
        experiments: the runs. Let those of one workload follow each other: its cost table is made once.
        jobs: processes; None: up to one for every usable core, as far as there is work for more than their start.
            Each holds one run, about 1 KiB a task, at a time. A hint that cannot be pickled runs in this process.
        progress: called with every outcome, in the order of the experiments, as soon as it and all before it are known.
    """
    jobs = _worthwhile(experiments) if jobs is None else whole("jobs", jobs, 1)
    rows: list[SweepRow] = []
    skipped: list[Skip] = []
    with closing(run_all(_outcome, experiments, jobs=jobs)) as outcomes:
        for experiment, answer in zip(experiments, outcomes, strict=True):
            outcome = Skip(experiment, answer) if isinstance(answer, str) else answer
            if isinstance(outcome, Skip):
                skipped.append(outcome)
            else:
                rows.append(outcome)
            if progress is not None:
                progress(outcome)
    return SweepResult(tuple(rows), tuple(skipped))


def _worthwhile(experiments: Sequence[Experiment]) -> int:
    """How many processes are worth their start."""
    tasks = sum(experiment.workload.num_tasks for experiment in experiments)
    return min(usable_cores(), 1 + tasks // TASKS_WORTH_A_PROCESS)


def _outcome(experiment: Experiment) -> SweepRow | str:
    # An experiment itself may not be picklable.
    try:
        return SweepRow.of(experiment, experiment.simulate())
    except (DeadlockError, HintError) as error:
        raise type(error)(f"{experiment}: {error}") from error
    except ConfigError as error:  # its values are right each by itself: it is the combination
        return str(error)
