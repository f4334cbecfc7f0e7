"""A cost table from recorded steps, so that the simulator compares hints and limits on a real job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from rrfp.core.placement import Placement
from rrfp.core.tasks import Kind, Task
from rrfp.costs.latency import LATENCY_MODELS, with_latency
from rrfp.costs.streams import Matrix
from rrfp.costs.table import CostTable
from rrfp.errors import ConfigError
from rrfp.trace.chrome_reader import TracedRun
from rrfp.trace.traced_step import TracedStep, is_training, traced_step

#: Which costs: of the recorded step whose time is the median of all, or of each task over all steps.
Choice = Literal["typical", "median", "mean"]

#: Makes one time of several.
Middle = Callable[[Sequence[float]], float]

#: Training steps that are left out at the beginning of a run: they import libraries and fill caches.
WARM_UP_STEPS = 2


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """The costs of a recorded step, or of several.

    Attributes:
        table: the costs.
        step: the number of the step whose costs these are; None for those of several.
        steps: recorded steps that were considered.
        left_out: the steps that were not, one line a reason.
        seconds: what the step took; of several, the median.
        measured: messages between stages of one step whose time is measured.
        filled: those for which a typical one of the others stands.
        clock_error: the most seconds by which a message's time is wrong because clocks of hosts differ.
    """

    table: CostTable
    step: int | None
    steps: int
    left_out: tuple[str, ...]
    seconds: float
    measured: int
    filled: int
    clock_error: float


def measured_costs(
    runs: Sequence[tuple[str, TracedRun]],
    *,
    skip_first: int = WARM_UP_STEPS,
    step: int | Choice = "typical",
    latency: str | None = None,
) -> MeasuredCosts:
    """The costs of the training steps of one or several runs of a job.

    The typical step keeps how microbatches differ, which is what hints are about. Averages over steps with other data
    in each make microbatches alike, and the simulated step too short.

    Args:
        runs: each with its name for errors.
        skip_first: training steps to leave out at the beginning of each run.
        step: ``"typical"``, the step whose time is the median; ``"median"`` or ``"mean"`` of each task and message over
            the steps; or a number: the step of that number, also at the beginning.
        latency: a model of `with_latency` instead of the recorded times of messages.

    Raises:
        ConfigError: if no step remains, a step is not whole, runs are of different pipelines, or no time of a message
            is known and there is no ``latency``.
    """
    if type(step) is not int and step not in get_args(Choice):
        raise ConfigError(f"step is {step!r}, must be a step's number or one of: {', '.join(get_args(Choice))}")
    left_out: Counter[str] = Counter()
    named = [pair for name, run in runs for pair in _chosen(name, run, skip_first, step, left_out)]
    if not named:
        raise ConfigError(_nothing_left(runs, skip_first, step))
    for name, other in named:
        if other.shape != named[0][1].shape:
            raise ConfigError(f"{name} has {other.shape}, {named[0][0]} has {named[0][1].shape}: must be one job's")
    [(microbatches, _)] = Counter(each.microbatches for _, each in named).most_common(1)
    steps = [each for _, each in named if each.microbatches == microbatches]
    left_out.update(f"of {each.microbatches} microbatches" for _, each in named if each.microbatches != microbatches)
    chosen = steps
    if step == "typical":
        chosen = [sorted(steps, key=lambda each: each.seconds)[(len(steps) - 1) // 2]]
    table, measured, filled = _table(chosen, np.mean if step == "mean" else np.median, latency)
    return MeasuredCosts(
        table,
        None if step in ("median", "mean") else chosen[0].number,
        len(steps),
        tuple(f"{count} {reason}" for reason, count in left_out.items()),
        float(np.median([each.seconds for each in chosen])),
        measured,
        filled,
        0.0 if latency is not None else max(run.clock_error for _, run in runs),
    )


def _chosen(
    name: str, run: TracedRun, skip_first: int, step: int | Choice, left_out: Counter[str]
) -> list[tuple[str, TracedStep]]:
    training = [trace for trace in run.steps if is_training(trace)]
    left_out["evaluation(s)"] += len(run.steps) - len(training)
    is_number = type(step) is int
    chosen = [trace for trace in training if trace.step == step] if is_number else training[skip_first:]
    left_out["other step(s)" if is_number else "at the beginning"] += len(training) - len(chosen)
    for reason in [reason for reason, count in left_out.items() if not count]:
        del left_out[reason]
    checked = []
    for trace in chosen:
        where = f"{name}, step {trace.step}"
        try:
            checked.append((where, traced_step(trace, run.num_stages)))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
    return checked


def _nothing_left(runs: Sequence[tuple[str, TracedRun]], skip_first: int, step: int | Choice) -> str:
    name, run = runs[0]
    numbers = [trace.step for trace in run.steps if is_training(trace)]
    if not numbers:
        return f"{name} has no training step, must have one (evaluations have no backward)"
    if type(step) is int:
        return f"step is {step}, must be one of: {', '.join(map(str, numbers))}"
    return f"{name} has {len(numbers)} training step(s), and skip-first is {skip_first}, must be less"


def _table(steps: Sequence[TracedStep], middle: Middle, latency: str | None) -> tuple[CostTable, int, int]:
    """The table, and how many of its latencies are measured and filled in."""
    shape, microbatches = steps[0].shape, steps[0].microbatches
    placement = Placement(shape.stages, shape.chunks, shape.placement)
    edges = range(shape.stages * shape.chunks - 1)
    crosses = [placement.stage_of(v) != placement.stage_of(v + 1) for v in edges]
    forward, backward = _latencies(steps, Kind.F, middle), _latencies(steps, Kind.B, middle)
    filled = int(np.isnan(forward[crosses]).sum() + np.isnan(backward[crosses]).sum())
    messages = 2 * sum(crosses) * microbatches
    if latency is None and messages and filled == messages:
        raise ConfigError(f"no time of a message is recorded: give latency, one of: {', '.join(LATENCY_MODELS)}")
    there, back = _filled(forward, backward, crosses)
    table = CostTable(
        shape.stages,
        shape.chunks,
        shape.placement,
        microbatches,
        _durations(steps, Kind.F, middle),
        _durations(steps, Kind.B, middle),
        _durations(steps, Kind.W, middle) if shape.split else None,
        there,
        back,
    )
    if latency is not None:
        return with_latency(table, latency), 0, 0
    return table, messages - filled, filled


def _durations(steps: Sequence[TracedStep], kind: Kind, middle: Middle) -> Matrix:
    """By virtual stage and microbatch; 0 where a virtual stage has no such tasks."""
    shape = steps[0].shape
    rows = np.zeros((shape.stages * shape.chunks, steps[0].microbatches))
    for v, m in np.ndindex(rows.shape):
        task = Task(kind, m, v)
        spans = [step.tasks[task] for step in steps if task in step.tasks]
        rows[v, m] = middle([span.end - span.start for span in spans]) if spans else 0.0
    return rows


def _latencies(steps: Sequence[TracedStep], kind: Kind, middle: Middle) -> Matrix:
    """By edge and microbatch; nan where none is known."""
    shape = steps[0].shape
    rows = np.full((shape.stages * shape.chunks - 1, steps[0].microbatches), np.nan)
    for v, m in np.ndindex(rows.shape):
        task = Task(kind, m, v if kind is Kind.F else v + 1)
        known = [step.latencies[task] for step in steps if task in step.latencies]
        rows[v, m] = middle(known) if known else np.nan
    return rows


def _filled(forward: Matrix, backward: Matrix, crosses: Sequence[bool]) -> list[Matrix]:
    """The same latencies, with the edge's median, or that of all, where one is unknown; 0 inside a stage."""
    known = np.concatenate([forward[crosses].ravel(), backward[crosses].ravel()])
    typical = float(np.nanmedian(known)) if np.isfinite(known).any() else 0.0
    matrices = []
    for rows in (forward, backward):
        rows = rows.copy()
        for v, row in enumerate(rows):
            usual = float(np.nanmedian(row)) if np.isfinite(row).any() else typical
            rows[v] = np.where(np.isnan(row), usual, row) if crosses[v] else 0.0
        matrices.append(rows)
    return matrices
