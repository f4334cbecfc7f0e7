"""The methods on one rank, each as a function that runs a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleZBVZeroBubble

from benchmarks.against_torch.settings import METHODS, TORCH_1F1B, TORCH_GPIPE, TORCH_ZBV, Settings
from benchmarks.shared.comparison import Comparison, Method, Runtime
from benchmarks.shared.sleeping import Stages, loss_fn
from benchmarks.shared.tables import Form
from benchmarks.shared.turns import SILENT, Step
from rrfp.model.topology import Topology
from rrfp.pipeline.api import Pipeline
from rrfp.pipeline.options import OptionArguments

_TORCH = {TORCH_1F1B: Schedule1F1B, TORCH_GPIPE: ScheduleGPipe, TORCH_ZBV: ScheduleZBVZeroBubble}


def steps_of(settings: Settings, rank: int, stages: Stages, stack: ExitStack) -> dict[str, Step]:
    """By name, a step of each method; ``stack`` closes what they need."""
    return {
        name: step_of(name, METHODS[name], settings, rank, stages, stack)
        for name in settings.methods
        if not METHODS[name].own_bytes
    }


def step_of(name: str, method: Method, settings: Comparison, rank: int, stages: Stages, stack: ExitStack) -> Step:
    """A step of one method; torch's schedules are recognised by their ``name``."""
    if method.runtime is Runtime.TORCH:
        return _torch_step(name, method, settings, rank, stages)
    return _rrfp_step(method, settings, rank, stages, stack)


def _torch_step(name: str, method: Method, settings: Comparison, rank: int, stages: Stages) -> Step:
    form, count = method.form, settings.microbatches
    placement = stages.placement(form)
    owned, total = placement.virtual_stages(rank), placement.num_virtual_stages
    parts = [
        PipelineStage(module, v, total, torch.device("cpu")) for v, module in zip(owned, stages.of(form), strict=True)
    ]
    given = parts if form is Form.V else parts[0]
    schedule = _TORCH[name](given, count, loss_fn=loss_fn, scale_grads=False)
    inputs = (torch.zeros(count, 1),) if 0 in owned else ()
    target = torch.zeros(count, 1) if total - 1 in owned else None
    numbers = torch.arange(count)

    def step(sizes: Sequence[float] | None) -> Callable[[], object]:
        losses: list[torch.Tensor] | None = None if target is None else []
        schedule.step(*inputs, target=target, losses=losses, return_outputs=False, microbatch=numbers)
        return lambda: None

    return step


def _rrfp_step(method: Method, settings: Comparison, rank: int, stages: Stages, stack: ExitStack) -> Step:
    count = settings.microbatches
    placement, modules = stages.placement(method.form), stages.of(method.form)
    options: OptionArguments = {"loss_fn": loss_fn, **SILENT, **method.options}
    part: nn.Module | list[nn.Module] = [*modules] if len(modules) > 1 else modules[0]
    pipe = stack.enter_context(Pipeline(part, topology=Topology.from_env(), **options).blocking())
    rows = [torch.zeros(1, 1) for _ in range(count)]
    owned = placement.virtual_stages(rank)
    inputs = rows if 0 in owned else None
    targets = rows if placement.num_virtual_stages - 1 in owned else None
    kwargs = [{"microbatch": torch.tensor([m])} for m in range(count)]

    def step(sizes: Sequence[float] | None) -> Callable[[], object]:
        result = pipe.step(inputs, targets, kwargs=kwargs, sizes=sizes)
        return lambda: result.breakdown

    return step
