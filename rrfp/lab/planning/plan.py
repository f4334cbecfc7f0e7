"""From a trace, the times of layers, or both, to plans."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Self

import numpy as np

from rrfp.errors import ConfigError
from rrfp.hints.registry import DEFAULT_HINT
from rrfp.lab.advice.advice import Adviser, Wishes, adviser_of, recording_of
from rrfp.lab.advice.recorded import RecordedStep
from rrfp.lab.advice.replays import Interval, Method, Replays, hint_text
from rrfp.lab.advice.report import DOUBTFUL
from rrfp.lab.limit_texts import DEFAULT_LIMIT
from rrfp.lab.planning.layers import Layers, read_layers
from rrfp.lab.planning.rebuilt import UNLIKE, RebuiltSteps, Recomputed
from rrfp.lab.planning.report import Plans, Row
from rrfp.lab.planning.search import MOST_TASKS, Budget, Candidate, Search
from rrfp.memory.admission import bytes_of
from rrfp.pipeline.plan_file import Plan
from rrfp.plain import whole
from rrfp.trace.job_data import REPLAY

#: Microbatches a stage of a step of which nobody has said how many it has.
PER_STAGE = 4


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be planned."""

    #: The file of `Split.save_layers`; without it layers stay where they are.
    layers: str | os.PathLike[str] | None = None
    #: A size such as ``8GB``: the most bytes that microbatches may hold on a stage.
    memory: str | None = None
    #: The numbers of microbatches to try, without a trace first the job's own; none: that of the trace, or `PER_STAGE`.
    microbatches: tuple[int, ...] = ()
    #: Stages whose ranks are slow: what else they take longer for would move with the layers.
    slow: tuple[int, ...] = ()
    #: A trace of the same job that recomputes on more stages, for plans by which some of them do; needs ``memory``.
    recomputed: str | os.PathLike[str] | None = None
    #: The most tasks that are simulated; what is begun is finished.
    tasks: int = MOST_TASKS

    def __post_init__(self) -> None:
        if self.memory is not None and not bytes_of(self.memory):
            raise ConfigError(f"memory is {self.memory!r}, must be a size such as 8GB (B, kB, MB, GB)")


@dataclass(frozen=True, slots=True)
class Basis:
    """The job that is planned: as it was recorded, or as its layers were measured."""

    name: str
    #: Microbatches, stages and method.
    title: str
    method: Method
    steps: Sequence[RecordedStep]
    #: Of the recorded steps, one line a reason.
    left_out: tuple[str, ...]
    #: Seconds of the mean step; None where nothing has run.
    measured: float | None
    #: The same, by the engine.
    predicted: float
    assumed: tuple[str, ...]
    #: Why the prediction is off by more than 5%; empty where it is not.
    doubt: str

    @classmethod
    def recorded(cls, adviser: Adviser) -> Self:
        if adviser.job.strict == REPLAY:
            raise ConfigError(
                f"{adviser.name}: the job replayed a logged step, must be one that chose its order itself"
            )
        if adviser.recording.costs.graph is not None:
            raise ConfigError(f"{adviser.name}: the model is no chain, which rrfp plan needs; rrfp advise takes it")
        return cls(
            adviser.name,
            adviser.title,
            adviser.method,
            adviser.recording.steps,
            adviser.recording.left_out,
            float(adviser.measured.mean()),
            float(adviser.base.seconds.mean()),
            (*adviser.assumed(),),
            adviser.doubt(),
        )

    @classmethod
    def of_layers(cls, name: str, layers: Layers, microbatches: int | None, wishes: Wishes) -> Self:
        """Of the file of `Split.save_layers`, as it cuts the model."""
        stages = layers.layout.where.stages
        costs = layers.costs(microbatches or PER_STAGE * stages)
        if wishes.strict is None:
            method = Method(wishes.hint or DEFAULT_HINT, wishes.limit or DEFAULT_LIMIT)
        else:
            method = Method(None, None, wishes.strict)
        gaps, taken = {kind: np.zeros_like(rows) for kind, rows in costs.durations.items()}, method.run(costs).makespan
        step = RecordedStep(costs, gaps, gaps, {}, 0.0, taken)
        assumed: tuple[str, ...] = (
            "every microbatch takes what the sample took: no jitter, no sizes that differ, so there is no interval",
            "each layer takes what it took alone on the rank that measured, and all ranks are as fast",
            "messages take no time, nor does dispatch: two chunks a stage have twice as many of both",
        )
        if microbatches is None:
            assumed = (*assumed, f"{costs.microbatches} microbatches a step, {PER_STAGE} a stage (--microbatches)")
        title = f"{costs.microbatches} microbatches on {stages} stages, {method}"
        return cls(name, title, method, (step,), (), None, taken, assumed, "")


def plan_file(
    path: str | None,
    request: Request = Request(),
    wishes: Wishes | None = None,
    ran: Callable[[], object] = lambda: None,
) -> Plans:
    """The plans for the job of a trace file, or of measured layers alone; ``ran`` is called after each step."""
    layers = None if request.layers is None else read_layers(request.layers)
    wishes = wishes or Wishes()
    if path is not None:
        basis, recomputed = Basis.recorded(adviser_of(path, wishes, ran)), None
        if request.recomputed is not None:
            if request.memory is None:
                raise ConfigError("recomputed needs --memory: without a budget in bytes recomputing only takes time")
            _, recording, _ = recording_of(os.fspath(request.recomputed), wishes)
            recomputed = Recomputed.between(basis.steps, recording.steps)
        return plans_of(basis, layers, request, ran, recomputed)
    if layers is None:
        raise ConfigError("TRACE or --layers FILE is needed: what tasks take was recorded, or measured by layers")
    for name, value in (("slow-rank", request.slow), ("recomputed", request.recomputed)):
        if value:
            raise ConfigError(f"{name} needs TRACE: layers alone do not say it")
    counts = _counts(request)
    basis = Basis.of_layers(os.fspath(request.layers or ""), layers, counts[0] if counts else None, wishes)
    return plans_of(basis, layers, request, ran)


def _counts(request: Request) -> tuple[int, ...]:
    return tuple(whole("microbatches", count, 1) for count in request.microbatches)


def plans_of(
    basis: Basis,
    layers: Layers | None,
    request: Request,
    ran: Callable[[], object],
    recomputed: Recomputed | None = None,
) -> Plans:
    num_bytes, costs = bytes_of(request.memory), basis.steps[0].costs
    if num_bytes is not None and costs.held is None:
        raise ConfigError(f"{basis.name}: the trace has no bytes, which --memory needs")
    slow = tuple(whole("slow-rank", stage, 0, costs.stages - 1) for stage in request.slow)
    if slow and layers is None:
        raise ConfigError("slow-rank needs --layers: only layers that are moved leave a slow rank")
    steps = RebuiltSteps(basis.steps, layers, slow, recomputed)
    budget = Budget(num_bytes, _counts(request), request.tasks, methods=basis.measured is not None)
    search = Search(basis.method, steps, budget, ran)
    search.run()
    return _plans(basis, steps, search)


def _plans(basis: Basis, steps: RebuiltSteps, search: Search) -> Plans:
    layers, is_recorded = steps.layers, basis.measured is not None
    now = search.result(search.now, search.numbers)
    layouts = f"{len(search.layouts)} cuts and placements, " if layers is not None else ""
    judged = "all on the recorded steps" if layers is None else "the best on other draws of the steps"
    rebuilt = float(now.seconds.mean()) if layers is not None and is_recorded else None
    doubt = basis.doubt
    if rebuilt is not None and abs(rebuilt / basis.predicted - 1) > DOUBTFUL and not doubt:
        doubt = _of_rebuilding(basis, steps, search, rebuilt)

    def row(name: str, candidate: Candidate) -> Row:
        return _row(name, candidate, search, steps)

    return Plans(
        basis.name,
        len(basis.steps) if is_recorded else 0,
        basis.left_out,
        basis.title,
        basis.measured,
        basis.predicted,
        rebuilt,
        row("now" if is_recorded else "as cut", search.now),
        tuple(row(f"{number}", each) for number, each in enumerate(search.ranked, 1)),
        None if search.guessed is None else row("if split", search.guessed),
        tuple(row(name, each) for name, each in search.peers.items()),
        f"{layouts}{len(search.tried)} candidates by simulation" + (f", {judged}" if is_recorded else ""),
        tuple(search.left_out),
        (*basis.assumed, *_assumed(basis, steps, search)),
        doubt,
        search.is_interrupted,
    )


def _of_rebuilding(basis: Basis, steps: RebuiltSteps, search: Search, rebuilt: float) -> str:
    """What of the steps, drawn anew, makes them take another time."""
    taken: dict[str, list[float]] = {}
    for number in search.numbers:
        for name, step in steps.in_part(number).items():
            taken.setdefault(name, []).append(basis.method.run(step.table()).makespan + step.closing)
    changes = {name: fmean(seconds) / basis.predicted - 1 for name, seconds in taken.items()}
    most = max(changes, key=lambda name: abs(changes[name]))
    return (
        f"steps rebuilt from layers take {rebuilt / basis.predicted - 1:+.1%} beside the recorded ones, and "
        f"{changes[most]:+.1%} if only {most} are drawn anew: as recorded they depend on the microbatch or the moment"
    )


def _row(name: str, candidate: Candidate, search: Search, steps: RebuiltSteps) -> Row:
    now, result = search.result(search.now, search.numbers), search.result(candidate, search.numbers)
    saved = [Replays(column, 0).saved(now.seconds) for column in result.brackets]
    mean = Replays(result.seconds, 0).saved(now.seconds).value
    interval = Interval(mean, min(each.low for each in saved), max(each.high for each in saved))
    layout, layers, method = candidate.layout, steps.layers, candidate.method
    where = steps.where if layout is None else layout.where
    text = str(method) if method.hint is None else f"{method}, split {candidate.split}"
    if candidate.microbatches != search.now.microbatches:
        text += f", {candidate.microbatches} microbatches"
    if candidate.recompute:
        text += f", recompute on {' '.join(map(str, candidate.recompute))}"
    plan = None
    others: dict[str, Any] = {}
    if method.hint is not None:
        hint = hint_text(method.hint).removeprefix("hint ")
        cuts, count = (None, None) if layout is None or layers is None else (layout.cuts, layers.count)
        how = hint, method.limit, candidate.split, cuts, count, candidate.recompute
        plan = Plan(where.stages, where.chunks, where.layout, *how)
        if layout is not None and layers is not None and layers.is_decoder:
            others = {"Megatron-LM": layers.megatron(layout), "torchtitan": layers.torchtitan(layout)}
    return Row(
        name,
        float(result.seconds.mean()),
        interval,
        result.held,
        result.num_bytes,
        "" if layout is None else layout.placement,
        "" if layout is None or layers is None else layout.counts(layers.count),
        text,
        plan,
        others,
    )


def _assumed(basis: Basis, steps: RebuiltSteps, search: Search) -> Iterator[str]:
    if search.guessed is not None:
        guess = (
            "weight gradients take a third to a half of backward: no plan rests on it; a split trace has their times"
        )
        yield f"if split, and of ZBV: {guess}"
    if (found := steps.recomputed) is not None:
        backward, held = (factors[found.is_measured] for factors in (found.backward, found.held))
        yield (
            f"stages that recompute: backward takes {backward.min():.2f} to {backward.max():.2f} times as "
            f"long, and {held.min():.2f} to {held.max():.2f} of the bytes are held, as in the other trace"
        )
        if not found.is_measured.all():
            others = " ".join(map(str, sorted({*range(steps.where.stages)} - {*steps.may_recompute(None)})))
            yield f"stages {others} hold no less there: they recompute in both traces or in neither, as in every plan"
    if steps.layers is None or basis.measured is None:
        return
    yield "a layer's part of its stage's recorded times and bytes: as measured on the sample"
    yield "jitter, dispatch and messages of other tasks: drawn from those of the same stage and link"
    unlike = [stage for stage, ratio in enumerate(steps.ratios) if abs(ratio - 1) > UNLIKE]
    if unlike:
        worst = max(unlike, key=lambda stage: abs(float(np.log(steps.ratios[stage]))))
        yield (
            f"stage {worst} takes {steps.ratios[worst]:.2f} times what its layers do, beside the middle stage: the "
            f"layers are taken to be as long on any rank (--slow-rank {worst}: it is the rank)"
        )
