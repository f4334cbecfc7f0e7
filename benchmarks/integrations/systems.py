"""The methods on one rank: torch's schedules and `ScheduleRRFP` on the same `PipelineStage` objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from benchmarks.integrations.receives import emulated
from benchmarks.integrations.settings import Settings, Way
from benchmarks.shared.comparison import Runtime
from benchmarks.shared.sleeping import Stages, loss_fn
from benchmarks.shared.tables import Form
from benchmarks.shared.turns import SILENT, Step
from rrfp import Limit
from rrfp.integrations.torch import ScheduleRRFP


class Buffers:
    """The receive buffers of one schedule on stages that it shares with others: there while it is entered.

    A schedule sets them up in its first step and relies on them from then on; so would the next one.
    """

    def __init__(self, stages: Sequence[Any]) -> None:
        self._stages = stages
        self._kept: list[tuple[dict[Any, Any], dict[Any, Any]]] = [({}, {}) for _ in stages]

    def __enter__(self) -> Self:
        for stage, kept in zip(self._stages, self._kept, strict=True):
            stage.args_recv_info, stage.grad_recv_info = kept
        return self

    def __exit__(self, *error: object) -> None:
        self._kept = [(stage.args_recv_info, stage.grad_recv_info) for stage in self._stages]


def steps_of(
    settings: Settings, methods: Iterable[str], rank: int, stages: Stages, stack: ExitStack
) -> dict[str, Step]:
    """By name, a step of each of ``methods``; ``stack`` closes what they need."""
    parts: dict[tuple[int, str], list[PipelineStage]] = {}
    steps = {}
    for name in methods:
        way = settings.METHODS[name]
        key = way.form.chunks, way.form.layout
        if key not in parts:
            parts[key] = pipeline_stages(way.form, rank, stages)
        steps[name] = step_of(way, settings, rank, parts[key], stack)
    return steps


def pipeline_stages(form: Form, rank: int, stages: Stages) -> list[PipelineStage]:
    """torch's stages around the rank's modules."""
    placement = stages.placement(form)
    modules = zip(placement.virtual_stages(rank), stages.of(form), strict=True)
    return [PipelineStage(module, v, placement.num_virtual_stages, torch.device("cpu")) for v, module in modules]


def step_of(way: Way, settings: Settings, rank: int, parts: list[PipelineStage], stack: ExitStack) -> Step:
    """A step of one method over ``parts``."""
    count, buffers = settings.microbatches, Buffers(parts)
    schedule = _schedule(way, settings, rank, parts, stack)
    inputs = (torch.zeros(count, 1),) if any(part.is_first for part in parts) else ()
    target = torch.zeros(count, 1) if any(part.is_last for part in parts) else None
    numbers = torch.arange(count)

    def step(sizes: Sequence[float] | None) -> Callable[[], object]:
        losses: list[torch.Tensor] | None = None if target is None else []
        with buffers, emulated(way.receives):
            schedule.step(*inputs, target=target, losses=losses, return_outputs=False, microbatch=numbers)
        result = getattr(schedule, "last_result", None)
        return lambda: None if result is None else result.breakdown

    return step


def _schedule(way: Way, settings: Settings, rank: int, parts: list[PipelineStage], stack: ExitStack) -> Any:
    count = settings.microbatches
    if way.runtime is Runtime.TORCH:
        of_torch = getattr(pipelining, way.schedule)
        return of_torch(parts if len(parts) > 1 else parts[0], count, loss_fn=loss_fn, scale_grads=False)
    options: dict[str, Any] = {**SILENT, **way.options}
    if way.as_torch:
        options["limit"] = Limit(settings.own_limit(way, rank))
    schedule = ScheduleRRFP(parts, count, loss_fn=loss_fn, scale_grads=False, **options)
    stack.callback(schedule.close)
    return schedule
