"""The methods on one rank: Megatron's schedules and RRFP in their place, on the same model chunks."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.integrations.settings import Settings, Way
from benchmarks.shared.comparison import Runtime
from benchmarks.shared.sleeping import SleepingStage, Stages
from benchmarks.shared.tables import Form
from benchmarks.shared.turns import SILENT, Step
from rrfp.integrations.megatron import forward_backward_func

warnings.filterwarnings("ignore", module=r"megatron\.")
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import_module("megatron_on_cpu")

from megatron.core import parallel_state  # noqa: E402 - it computes on CUDA devices alone
from megatron.core.pipeline_parallel import schedules  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

#: Of the tensors between chunks: how they are cut into sequence, microbatch and hidden size changes nothing.
_HIDDEN = 64


class Chunk(nn.Module):
    """A stage as Megatron's schedules see it: called with a microbatch's number, its input set beforehand."""

    def __init__(self, config: Any, stage: SleepingStage) -> None:
        super().__init__()
        self.config, self.model_type = config, None
        self._stage = stage
        self._entered: Tensor | None = None

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        """Take the output of the chunk before, or None."""
        (self._entered,) = tensors

    def forward(self, microbatch: int) -> Tensor:
        """Run the stage."""
        entered = torch.zeros(1) if self._entered is None else self._entered.view(-1)
        output: Tensor = self._stage(entered, torch.tensor(microbatch))
        return output.view(-1, 1, min(_HIDDEN, output.numel()))


def steps_of(settings: Settings, methods: Iterable[str], stages: Stages, stack: ExitStack) -> dict[str, Step]:
    """By name, a step of each of ``methods``; ``stack`` closes what they need."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=settings.stages)
    stack.callback(parallel_state.destroy_model_parallel)
    chunks = {form: _chunks(form, settings, stages) for form in (Form.WHOLE, Form.LOOPED)}
    ways = {name: settings.METHODS[name] for name in methods}
    return {name: _step(way, settings, chunks[way.form], stack) for name, way in ways.items()}


def _chunks(form: Form, settings: Settings, stages: Stages) -> list[Chunk]:
    is_interleaved = form.chunks > 1
    config = TransformerConfig(
        num_layers=settings.stages * form.chunks,
        hidden_size=_HIDDEN,
        num_attention_heads=1,
        pipeline_model_parallel_size=settings.stages,
        virtual_pipeline_model_parallel_size=form.chunks if is_interleaved else None,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        batch_p2p_comm=False,
        overlap_p2p_comm=is_interleaved,
    )
    return [Chunk(config, stage) for stage in stages.of(form)]


def _step(way: Way, settings: Settings, chunks: list[Chunk], stack: ExitStack) -> Step:
    run, is_interleaved = _schedule(way, stack), len(chunks) > 1

    def step(sizes: Sequence[float] | None) -> Callable[[], object]:
        numbers = [iter(range(settings.microbatches)) for _ in chunks]
        run(
            forward_step_func=_forward_step,
            data_iterator=numbers if is_interleaved else numbers[0],
            model=chunks if is_interleaved else chunks[0],
            num_microbatches=settings.microbatches,
            seq_length=settings.num_bytes // 4 // _HIDDEN,
            micro_batch_size=1,
        )
        result = getattr(run, "last_result", None)
        return lambda: None if result is None else result.breakdown

    return step


def _schedule(way: Way, stack: ExitStack) -> Callable[..., Any]:
    if way.runtime is Runtime.MEGATRON:
        own: Callable[..., Any] = (
            schedules.forward_backward_pipelining_without_interleaving
            if way.form is Form.WHOLE
            else schedules.forward_backward_pipelining_with_interleaving
        )
        return own
    options: dict[str, Any] = {**SILENT, **({} if way.as_torch else {"limit": way.options["limit"]})}
    made = forward_backward_func(**options)
    stack.callback(made.close)
    return made


def _forward_step(numbers: Iterator[int], chunk: Chunk) -> tuple[Tensor, Callable[[Tensor], Any]]:
    return chunk(next(numbers)), lambda output: (output.sum(), {})
