"""The GPT of the parity experiment: Megatron-core's model, which every runtime trains as it is.

Its texts are drawn from a Markov chain, so that there is something to learn.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.parity.settings import STAGES, Method, Runtime, Settings
from benchmarks.parity.training import Losses, Training
from rrfp.integrations.megatron import forward_backward_func
from rrfp.model.topology import Topology
from rrfp.pipeline.api import Pipeline
from rrfp.pipeline.options import OptionArguments
from rrfp.testing.reference import reference

warnings.filterwarnings("ignore", module=r"megatron\.")
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import_module("megatron_on_cpu")

from megatron.core import parallel_state  # noqa: E402 - it computes on CUDA devices alone
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.pipeline_parallel import schedules  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

VOCABULARY, LENGTH, ROWS, HIDDEN = 64, 16, 2, 32


@dataclass(frozen=True, slots=True)
class Batch:
    """The texts of an iteration, one tensor a microbatch."""

    tokens: tuple[Tensor, ...]
    labels: tuple[Tensor, ...]

    @classmethod
    def drawn(cls, microbatches: int, seed: int) -> Batch:
        """The same on all ranks."""
        generator = torch.Generator().manual_seed(seed)
        words = [torch.randint(VOCABULARY, (microbatches * ROWS,), generator=generator)]
        for _ in range(LENGTH):
            words.append(torch.multinomial(_following()[words[-1]], 1, generator=generator).flatten())
        texts = torch.stack(words, 1)
        return cls(*(torch.split(own.contiguous(), ROWS) for own in (texts[:, :-1], texts[:, 1:])))


@lru_cache(maxsize=1)
def _following() -> Tensor:
    """Of each word, the probabilities of the next."""
    logits = 2.5 * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0))
    return logits.softmax(1)


class GptStage(nn.Module):
    """A chunk of Megatron's model, called with the output of the stage before, or with tokens."""

    def __init__(self, chunk: Any) -> None:
        super().__init__()
        self.chunk = chunk

    def forward(self, received: Tensor, labels: Tensor) -> Tensor:
        """Hidden states, or on the last stage each token's loss."""
        if self.chunk.pre_process:
            return called(self.chunk, received, labels)
        self.chunk.set_input_tensor([received])
        return called(self.chunk, None, labels)


def called(chunk: Any, tokens: Tensor | None, labels: Tensor) -> Tensor:
    """The output of a chunk whose input has been set."""
    mask = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
    positions = torch.arange(LENGTH).expand(ROWS, -1)
    output: Tensor = chunk(tokens, positions, mask, labels=labels if chunk.post_process else None)
    return output


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """The mean loss of a microbatch."""
    return output.mean()


class GptTraining(Training[Batch]):
    """Trains the GPT by one method."""

    def __init__(self, settings: Settings, method: Method, stack: ExitStack) -> None:
        self._settings, self._method = settings, method
        rank = dist.get_rank()
        of_stages = range(STAGES) if method.runtime is Runtime.ONE_PROCESS else [rank]
        self.chunks = [self._chunk(stage) for stage in of_stages]
        parallel_state.set_pipeline_model_parallel_rank(None)
        self._stages = [GptStage(chunk) for chunk in self.chunks]
        self._run = self._runner(rank, stack)

    @staticmethod
    def prepare(stack: ExitStack) -> None:
        """What Megatron needs to know of the ranks."""
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=STAGES)
        stack.callback(parallel_state.destroy_model_parallel)

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for chunk in self.chunks for parameter in chunk.parameters()]

    def batch(self, seed: int) -> Batch:
        return Batch.drawn(self._settings.microbatches, seed)

    def step(self, batch: Batch) -> Losses:
        return self._run(batch, True)

    def evaluate(self, batch: Batch) -> Losses:
        with torch.no_grad():
            return self._run(batch, False)

    def _chunk(self, stage: int) -> Any:
        parallel_state.set_pipeline_model_parallel_rank(stage)  # where the model is built in one process
        config = TransformerConfig(
            num_layers=STAGES,
            hidden_size=HIDDEN,
            num_attention_heads=2,
            pipeline_model_parallel_size=STAGES,
            pipeline_dtype=torch.float32,
            use_cpu_initialization=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            gradient_accumulation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            batch_p2p_comm=False,
        )
        torch.manual_seed(1000 * self._settings.seed + stage)
        return GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(),
            vocab_size=VOCABULARY,
            max_sequence_length=LENGTH,
            pre_process=stage == 0,
            post_process=stage == STAGES - 1,
        )

    def _runner(self, rank: int, stack: ExitStack) -> Callable[[Batch, bool], Losses]:
        """What runs a step, or with False forwards alone; the losses where the last stage is."""
        match self._method.runtime:
            case Runtime.ONE_PROCESS:
                return self._in_one_process
            case Runtime.TORCH:
                return self._by_torch(rank)
            case Runtime.MEGATRON:
                return self._by_megatron(rank, schedules.forward_backward_pipelining_without_interleaving)
            case Runtime.IN_MEGATRON:
                run = forward_backward_func()
                stack.callback(run.close)
                return self._by_megatron(rank, run)
            case Runtime.RRFP:
                return self._by_rrfp(rank, stack)

    def _in_one_process(self, batch: Batch, trains: bool) -> Losses:
        kwargs = [{"labels": labels} for labels in batch.labels]
        return reference(self._stages, batch.tokens, batch.labels, loss_fn=loss_fn, kwargs=kwargs).losses

    def _by_torch(self, rank: int) -> Callable[[Batch, bool], Losses]:
        stage = PipelineStage(self._stages[0], rank, STAGES, torch.device("cpu"))
        schedule = Schedule1F1B(stage, self._settings.microbatches, loss_fn=loss_fn)

        def run(batch: Batch, trains: bool) -> Losses:
            labels, losses = torch.cat(batch.labels), list[Tensor]()
            inputs = (torch.cat(batch.tokens),) if rank == 0 else ()
            own: dict[str, Any] = {"target": labels, "losses": losses} if rank == STAGES - 1 else {}
            (schedule.step if trains else schedule.eval)(*inputs, **own, labels=labels, return_outputs=False)
            return losses

        return run

    def _by_megatron(self, rank: int, schedule: Callable[..., Any]) -> Callable[[Batch, bool], Losses]:
        def run(batch: Batch, trains: bool) -> Losses:
            stored = schedule(
                forward_step_func=_forward_step,
                data_iterator=zip(batch.tokens, batch.labels, strict=True),
                model=self.chunks[0],
                num_microbatches=self._settings.microbatches,
                seq_length=LENGTH,
                micro_batch_size=ROWS,
                forward_only=not trains,
            )
            return [each["loss"] for each in stored] if rank == STAGES - 1 else []

        return run

    def _by_rrfp(self, rank: int, stack: ExitStack) -> Callable[[Batch, bool], Losses]:
        options: OptionArguments = {"loss_fn": loss_fn, **self._method.options}
        pipeline = Pipeline(self._stages[0], topology=Topology.from_env(), **options)
        pipe = stack.enter_context(pipeline.blocking())

        def run(batch: Batch, trains: bool) -> Losses:
            inputs = list(batch.tokens) if rank == 0 else None
            targets = list(batch.labels) if rank == STAGES - 1 else None
            kwargs = [{"labels": labels} for labels in batch.labels]
            losses: Losses = (pipe.step if trains else pipe.evaluate)(inputs, targets, kwargs=kwargs).losses
            return losses

        return run


def _forward_step(
    texts: Iterator[tuple[Tensor, Tensor]], chunk: Any
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]]:
    """As in Megatron's trainer."""
    tokens, labels = next(texts)

    def loss(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        mean = output.mean()
        return mean, {"loss": mean.detach().clone()}

    return called(chunk, tokens if chunk.pre_process else None, labels), loss
