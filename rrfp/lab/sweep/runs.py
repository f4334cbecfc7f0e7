"""Many simulated runs: workloads by methods by seeds, over several processes, a tidy row for each.

`sweep` is `rrfp sweep` from Python:

    experiments = [Experiment(workload, method) for workload in workloads for method in methods]
    result = sweep(experiments)

It runs experiments and makes rows of them; spreads, tables and pictures of rows are made elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

from rrfp.errors import ConfigError, DeadlockError, HintError
from rrfp.lab.sweep.experiment import Experiment
from rrfp.lab.sweep.pool import run_all, usable_cores
from rrfp.lab.sweep.rows import SweepRow
from rrfp.plain import whole

#: Simulated tasks that take about as long as starting two processes, which is a second.
TASKS_WORTH_A_PROCESS = 100_000


@dataclass(frozen=True, slots=True)
class Skip:
    """A run that was not made because its method does not fit its workload."""

    #: The run.
    experiment: Experiment
    #: What does not fit, in one line.
    reason: str


@dataclass(frozen=True, slots=True)
class SweepResult:
    """The outcomes of a sweep, both in the order of its experiments."""

    #: a row a run.
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
    """The row, or why there is none. An experiment itself may not be picklable."""
    try:
        return SweepRow.of(experiment, experiment.simulate())
    except (DeadlockError, HintError) as error:
        raise type(error)(f"{experiment}: {error}") from error
    except ConfigError as error:  # its values are right each by itself: it is the combination
        return str(error)
