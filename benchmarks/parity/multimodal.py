"""The multimodal model of the parity experiment, that of examples/train_multimodal.py: two encoders beside a GPT.

Encoders are branches of a graph. A strict 1F1B needs a chain: there every microbatch walks through all stages, with
what it has of picture and sound; the parameters are the same.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.parity.settings import STAGES, Method, Runtime, Settings
from benchmarks.parity.training import Losses, Training
from rrfp.model.topology import Topology
from rrfp.pipeline.api import Pipeline
from rrfp.testing.reference import reference

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
_EXAMPLE: Any = import_module("train_multimodal")

#: Texts of a microbatch.
SIZE = 4


class MultimodalTraining(Training[Any]):
    """Trains the model by one method."""

    def __init__(self, settings: Settings, method: Method, stack: ExitStack) -> None:
        self._settings = settings
        self._form = "chain" if "strict" in method.options else "branch"
        layout = _EXAMPLE.Layout.of(self._form, STAGES)
        self._is_alone = method.runtime is Runtime.ONE_PROCESS
        of_stages = range(STAGES) if self._is_alone else [dist.get_rank()]
        self._modules = [layout.modules(stage) for stage in of_stages]
        for stage, own in zip(of_stages, self._modules, strict=True):
            _draw(_listed(own), 1000 * settings.seed + stage)
        self._graph = layout.graph()
        if not self._is_alone:
            options: Any = {"graph": self._graph} if self._graph is not None else {}
            options |= {"loss_fn": _EXAMPLE.loss_fn, **method.options}
            pipeline = Pipeline(self._modules[0], topology=Topology.from_env(), **options)
            self._pipe = stack.enter_context(pipeline.blocking())

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for own in self._modules for module in _listed(own) for parameter in module.parameters()]

    def batch(self, seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        return _EXAMPLE.Batch.drawn(self._settings.microbatches, SIZE, generator)

    def step(self, batch: Any) -> Losses:
        return self._in_one_process(batch) if self._is_alone else self._pipe.step(**self._arguments(batch)).losses

    def evaluate(self, batch: Any) -> Losses:
        if not self._is_alone:
            return self._pipe.evaluate(**self._arguments(batch)).losses
        with torch.no_grad():
            return self._in_one_process(batch)

    def _in_one_process(self, batch: Any) -> Losses:
        by_part = {name: [own[name] for own in self._modules if name in own] for name in self._graph.parts}
        arguments = self._arguments(batch)
        return reference(by_part, **arguments, loss_fn=_EXAMPLE.loss_fn, graph=self._graph).losses

    def _arguments(self, batch: Any) -> dict[str, Any]:
        arguments: dict[str, Any] = batch.arguments(self._form)
        del arguments["sizes"]  # of no use to one process
        return arguments


def _listed(own: Any) -> list[nn.Module]:
    """The modules of a stage."""
    return list(own.values()) if isinstance(own, dict) else [own]


def _draw(modules: list[nn.Module], seed: int) -> None:
    """Draw the weights anew: those of the example do not depend on a seed."""
    torch.manual_seed(seed)
    for module in modules:
        for parameter in module.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
