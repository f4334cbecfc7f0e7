"""DeepSpeed's 1F1B on one rank: its pipeline engine, around the rank's sleeping module."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers.settings import Settings
from benchmarks.shared.sleeping import Stages, loss_fn
from benchmarks.shared.tables import Form
from benchmarks.shared.turns import Step

logging.getLogger("DeepSpeed").setLevel(logging.WARNING)

import deepspeed  # noqa: E402 - it logs while it is imported
from deepspeed.pipe import LayerSpec, PipelineModule  # noqa: E402
from deepspeed.runtime.pipe import schedule  # noqa: E402


class Layer(nn.Module):
    """A stage as DeepSpeed sees it: called with a tensor alone, and so it counts the microbatches itself."""

    def __init__(self, stages: Stages) -> None:
        super().__init__()
        (self._stage,) = stages.of(Form.WHOLE)
        self.numbers: Iterator[int] = iter(())

    def forward(self, received: Tensor) -> Tensor:
        """Run the stage for the next microbatch: 1F1B has them in order."""
        output: Tensor = self._stage(received, torch.tensor(next(self.numbers)))
        return output


def steps_of(settings: Settings, methods: Iterable[str], stages: Stages) -> dict[str, Step]:
    """By name, a step of each of ``methods``."""
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    return {name: _step(settings, stages) for name in methods}


def _step(settings: Settings, stages: Stages) -> Step:
    count = settings.microbatches
    specs = [LayerSpec(Layer, stages) for _ in range(settings.stages)]
    model = PipelineModule(specs, num_stages=settings.stages, loss_fn=loss_fn, partition_method="uniform")
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": count,
        "steps_per_print": 1 << 30,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), config=config, dist_init_required=False
    )
    # A step ends with the last backward, as in the other systems: gradients are looked at before they are cleared.
    left_out = (schedule.ReduceTiedGrads, schedule.ReduceGrads, schedule.OptimizerStep)
    engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, **dict.fromkeys(left_out, _nothing)}
    (layer,) = (module for module in model.modules() if isinstance(module, Layer))
    rows = [(torch.zeros(1), torch.zeros(1)) for _ in range(count)]

    def step(sizes: Sequence[float] | None) -> Callable[[], object]:
        layer.numbers = iter(range(count))
        engine.train_batch(iter(rows))
        return lambda: None

    return step


def _nothing(engine: Any, **arguments: Any) -> None: ...
