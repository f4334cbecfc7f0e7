"""A cost table from recorded steps, so that the simulator compares hints and limits on a real job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from rrfp.core.graph import Graph
from rrfp.core.tasks import Kind, Task
from rrfp.core.visits import Visits
from rrfp.costs.latency import LATENCY_MODELS, with_latency
from rrfp.costs.streams import Bits, Matrix
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
    if step in ("median", "mean") and len({each.skipped for each in steps}) > 1:
        raise ConfigError(
            f"step is {step!r}, and microbatches skip other parts in one step than in another: must be 'typical' or "
            "the number of a step"
        )
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
            checked.append((where, traced_step(trace, run.num_stages, run.graph)))
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
    shape, microbatches, skipped = steps[0].shape, steps[0].microbatches, steps[0].skipped
    graph, visits = shape.to_graph(), Visits(microbatches, skipped)
    forward, backward = _latencies(steps, graph, Kind.F, middle), _latencies(steps, graph, Kind.B, middle)
    sent = [_sent(graph, visits, kind) for kind in (Kind.F, Kind.B)]
    filled = sum(int(np.isnan(rows[mask]).sum()) for rows, mask in zip((forward, backward), sent, strict=True))
    messages = int(sum(mask.sum() for mask in sent))
    if latency is None and messages and filled == messages:
        raise ConfigError(f"no time of a message is recorded: give latency, one of: {', '.join(LATENCY_MODELS)}")
    there, back = _filled(forward, backward, _crosses(graph))
    matrices: dict[str, Any] = {
        "forward": _durations(steps, graph, Kind.F, middle),
        "backward": _durations(steps, graph, Kind.B, middle),
        "weight": _durations(steps, graph, Kind.W, middle) if shape.split else None,
        "latency_forward": there,
        "latency_backward": back,
    }
    if shape.graph is not None:
        table = CostTable.of_graph(shape.graph, microbatches, skipped=skipped, **matrices)
    else:
        table = CostTable(shape.stages, shape.chunks, shape.placement, microbatches, **matrices)
    if latency is not None:
        return with_latency(table, latency), 0, 0
    return table, messages - filled, filled


def _edges(graph: Graph) -> tuple[tuple[int, int], ...]:
    return graph.edges or ()


def _crosses(graph: Graph) -> list[bool]:
    """Whether each edge leads to another stage."""
    return [graph.stage_of[u] != graph.stage_of[v] for u, v in _edges(graph)]


def _sent(graph: Graph, visits: Visits, kind: Kind) -> Bits:
    """By edge and microbatch, whether there is a message: one for all edges from a virtual stage to one other stage."""
    sent = np.zeros((len(_edges(graph)), visits.microbatches), dtype=bool)
    known: set[tuple[int, int, int]] = set()
    for e, m in np.ndindex(sent.shape):
        u, v = _edges(graph)[e]
        message = (m, u, graph.stage_of[v]) if kind is Kind.F else (m, v, graph.stage_of[u])
        exists = not {u, v} & visits.skipped_by(m) and graph.stage_of[u] != graph.stage_of[v]
        if exists and message not in known:
            known.add(message)
            sent[e, m] = True
    return sent


def _durations(steps: Sequence[TracedStep], graph: Graph, kind: Kind, middle: Middle) -> Matrix:
    """By virtual stage and microbatch; 0 where a virtual stage has no such tasks."""
    rows = np.zeros((len(graph.stage_of), steps[0].microbatches))
    for v, m in np.ndindex(rows.shape):
        task = Task(kind, m, v)
        spans = [step.tasks[task] for step in steps if task in step.tasks]
        rows[v, m] = middle([span.end - span.start for span in spans]) if spans else 0.0
    return rows


def _latencies(steps: Sequence[TracedStep], graph: Graph, kind: Kind, middle: Middle) -> Matrix:
    """By edge and microbatch; nan where none is known."""
    rows = np.full((len(_edges(graph)), steps[0].microbatches), np.nan)
    for e, m in np.ndindex(rows.shape):
        u, v = _edges(graph)[e]
        source, target = (u, v) if kind is Kind.F else (v, u)
        message = (Task(kind, m, source), graph.stage_of[target])
        known = [step.latencies[message] for step in steps if message in step.latencies]
        rows[e, m] = middle(known) if known else np.nan
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
