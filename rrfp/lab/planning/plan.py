"""From a trace, and the times of layers, to plans."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from rrfp.errors import ConfigError
from rrfp.lab.advice.advice import Adviser, Wishes, adviser_of
from rrfp.lab.advice.replays import Interval, Replays, hint_text, limit_text
from rrfp.lab.advice.report import DOUBTFUL
from rrfp.lab.planning.layers import Layers, read_layers
from rrfp.lab.planning.rebuilt import UNLIKE, RebuiltSteps
from rrfp.lab.planning.report import Plans, Row
from rrfp.lab.planning.search import MOST_TASKS, Budget, Candidate, Search
from rrfp.memory.admission import bytes_of
from rrfp.pipeline.plan_file import Plan
from rrfp.plain import whole
from rrfp.trace.job_data import REPLAY


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be planned beside the trace."""

    #: The file of `Split.save_layers`; without it layers stay where they are.
    layers: str | os.PathLike[str] | None = None
    #: A size such as ``8GB``: the most bytes that microbatches may hold on a stage.
    memory: str | None = None
    #: The numbers of microbatches to try; none: that of the trace.
    microbatches: tuple[int, ...] = ()
    #: Stages whose ranks are slow: what else they take longer for would move with the layers.
    slow: tuple[int, ...] = ()
    #: The most tasks that are simulated; what is begun is finished.
    tasks: int = MOST_TASKS


def plan_file(
    path: str,
    request: Request = Request(),
    wishes: Wishes | None = None,
    ran: Callable[[], object] = lambda: None,
) -> Plans:
    """The plans for the job of a trace file; ``ran`` is called after each simulated step."""
    layers = None if request.layers is None else read_layers(request.layers)
    return plans_of(adviser_of(path, wishes or Wishes(), ran), layers, request, ran)


def plans_of(adviser: Adviser, layers: Layers | None, request: Request, ran: Callable[[], object]) -> Plans:
    """The plans for a recorded job."""
    num_bytes = None
    if request.memory is not None and not (num_bytes := bytes_of(request.memory)):
        raise ConfigError(f"memory is {request.memory!r}, must be a size such as 8GB (B, kB, MB, GB)")
    counts = tuple(whole("microbatches", count, 1) for count in request.microbatches)
    costs = adviser.recording.costs
    if adviser.job.strict == REPLAY:
        raise ConfigError(f"{adviser.name}: the job replayed a logged step, must be one that chose its order itself")
    if costs.graph is not None:
        raise ConfigError(f"{adviser.name}: the model is no chain, which rrfp plan needs; rrfp advise takes it")
    if num_bytes is not None and costs.held is None:
        raise ConfigError(f"{adviser.name}: the trace has no bytes, which --memory needs")
    slow = tuple(whole("slow-rank", stage, 0, costs.stages - 1) for stage in request.slow)
    if slow and layers is None:
        raise ConfigError("slow-rank needs --layers: only layers that are moved leave a slow rank")
    steps = RebuiltSteps(adviser.recording, layers, slow)
    search = Search(adviser, steps, Budget(num_bytes, counts, request.tasks), ran)
    search.run()
    return _plans(adviser, steps, search)


def _plans(adviser: Adviser, steps: RebuiltSteps, search: Search) -> Plans:
    recording, layers = adviser.recording, steps.layers
    now = search.result(search.now, search.numbers)
    layouts = f"{len(search.layouts)} cuts and placements, " if layers is not None else ""
    judged = "the best on other draws of the steps" if layers is not None else "all on the recorded steps"
    rebuilt = None if layers is None else float(now.seconds.mean())
    doubt, predicted = adviser.doubt(), float(adviser.base.seconds.mean())
    if rebuilt is not None and abs(rebuilt / predicted - 1) > DOUBTFUL and not doubt:
        doubt = f"steps rebuilt from layers take {rebuilt / predicted - 1:+.1%} beside the recorded ones"

    def row(name: str, candidate: Candidate) -> Row:
        return _row(name, candidate, search, steps)

    return Plans(
        adviser.name,
        len(recording.steps),
        recording.left_out,
        adviser.title,
        float(adviser.measured.mean()),
        predicted,
        rebuilt,
        row("now", search.now),
        tuple(row(f"{number}", each) for number, each in enumerate(search.ranked, 1)),
        None if search.guessed is None else row("if split", search.guessed),
        tuple(row(name, each) for name, each in search.peers.items()),
        f"{layouts}{len(search.tried)} candidates by simulation, {judged}",
        tuple(search.left_out),
        (*adviser.assumed(), *_assumed(steps, search)),
        doubt,
        search.is_interrupted,
    )


def _row(name: str, candidate: Candidate, search: Search, steps: RebuiltSteps) -> Row:
    now, result = search.result(search.now, search.numbers), search.result(candidate, search.numbers)
    saved = [Replays(column, 0).saved(now.seconds) for column in result.brackets]
    mean = Replays(result.seconds, 0).saved(now.seconds).value
    interval = Interval(mean, min(each.low for each in saved), max(each.high for each in saved))
    layout, layers, method = candidate.layout, steps.layers, candidate.method
    where = steps.where if layout is None else layout.where
    text = method.strict if method.hint is None else f"{hint_text(method.hint)}, limit {limit_text(method.limit)}"
    text = f"{text} (strict)" if method.hint is None else f"{text}, split {candidate.split}"
    if candidate.microbatches != search.now.microbatches:
        text += f", {candidate.microbatches} microbatches"
    plan = None
    others: dict[str, Any] = {}
    if method.hint is not None:
        hint = hint_text(method.hint).removeprefix("hint ")
        cuts, count = (None, None) if layout is None or layers is None else (layout.cuts, layers.count)
        plan = Plan(where.stages, where.chunks, where.layout, hint, method.limit, candidate.split, cuts, count)
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


def _assumed(steps: RebuiltSteps, search: Search) -> Iterator[str]:
    """What candidates rest on."""
    if search.guessed is not None:
        guess = (
            "weight gradients take a third to a half of backward: no plan rests on it; a split trace has their times"
        )
        yield f"if split, and of ZBV: {guess}"
    if steps.layers is None:
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
