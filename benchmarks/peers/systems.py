"""The methods on one rank, each as a function that runs a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import nn

from benchmarks.integrations import settings as integrations
from benchmarks.integrations import systems as on_torch
from benchmarks.integrations.settings import Place, Way
from benchmarks.peers.settings import METHODS, Settings
from benchmarks.shared.sleeping import Stages, loss_fn
from benchmarks.shared.turns import SILENT, Step
from rrfp.model.topology import Topology
from rrfp.pipeline.api import Pipeline
from rrfp.pipeline.options import OptionArguments


def steps_of(settings: Settings, rank: int, stages: Stages, stack: ExitStack) -> dict[str, Step]:
    """By name, a step of each method; ``stack`` closes what they need."""
    names: dict[Place, list[str]] = {}
    for name in settings.methods:
        if not METHODS[name].own_bytes:
            names.setdefault(METHODS[name].place, []).append(name)
    steps = {
        name: _pipeline_step(METHODS[name], settings, rank, stages, stack) for name in names.get(Place.PIPELINE, ())
    }
    steps |= on_torch.steps_of(settings, names.get(Place.STAGES, ()), rank, stages, stack)
    # Neither is imported without its methods. Megatron comes last: what stands in for CUDA there changes torch.
    if Place.LAYERS in names:
        from benchmarks.peers import deepspeed_systems as on_deepspeed

        steps |= on_deepspeed.steps_of(settings, names[Place.LAYERS], stages)
    if Place.CHUNKS in names:
        from benchmarks.integrations import megatron_systems as on_megatron

        steps |= on_megatron.steps_of(settings, names[Place.CHUNKS], stages, stack)
    return steps


def step_of(way: Way, settings: integrations.Settings, rank: int, stages: Stages, stack: ExitStack) -> Step:
    """A step of one method of RRFP's pipeline or torch's schedules."""
    if way.place is Place.PIPELINE:
        return _pipeline_step(way, settings, rank, stages, stack)
    return on_torch.step_of(way, settings, rank, on_torch.pipeline_stages(way.form, rank, stages), stack)


def _pipeline_step(way: Way, settings: integrations.Settings, rank: int, stages: Stages, stack: ExitStack) -> Step:
    count = settings.microbatches
    placement, modules = stages.placement(way.form), stages.of(way.form)
    options: OptionArguments = {"loss_fn": loss_fn, **SILENT, **way.options}
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
