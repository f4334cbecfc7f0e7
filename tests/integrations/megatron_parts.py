"""A tiny GPT of megatron-core and what trains it, as a script of Megatron's would set them up."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from integrations import megatron_prepared  # noqa: F401
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

import rrfp
from rrfp.hints import ReadySet, Task, View

VOCABULARY, LENGTH = 48, 8
#: Modules that imitate TransformerEngine's.
OVERWRITING = "RowParallelLinear"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Shuffle(rrfp.Hint):
    """Any ready task: an order that no schedule has."""

    def __init__(self) -> None:
        self._random = random.Random(5)

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        return self._random.choice(list(ready))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A model, how it is laid out and trained."""

    pp: int = 2
    #: Model chunks of a rank; None: Megatron's schedule without interleaving.
    vp: int | None = None
    tp: int = 1
    #: Context parallelism: each rank has a part of every sequence.
    cp: int = 1
    dp: int = 1
    #: Expert parallelism, over replicas.
    ep: int = 1
    microbatches: int = 6
    dtype: str = "fp32"
    #: How gradients are reduced: ``none``, Megatron's wrapper is left out; ``end``, by finalize; ``overlap``, by the
    #: last backward's hooks; ``align``, by ``grad_sync_func``.
    ddp: str = "end"
    shards_optimizer: bool = False
    gathers_parameters: bool = False
    ties: bool = False
    ragged: bool = False
    jitter: bool = False
    #: Imitates TransformerEngine: the backward of a flagged microbatch overwrites ``main_grad``.
    overwrites: bool = False
    #: A counter of each timer.
    timers: bool = False
    #: Of the model.
    config: dict[str, Any] = field(default_factory=dict)
    #: Of the pipeline.
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return self.pp * self.tp * self.cp * self.dp


class Timer:
    """Checks that starts and stops alternate, and counts them."""

    def __init__(self, name: str) -> None:
        self.name, self.runs, self.count = name, False, 0

    def start(self, barrier: bool = False) -> None:
        assert not self.runs, self.name
        self.runs = True

    def stop(self, barrier: bool = False) -> None:
        assert self.runs, self.name
        self.runs, self.count = False, self.count + 1


class Timers(dict[str, Timer]):
    def __call__(self, name: str, log_level: int = 0) -> Timer:
        return self.setdefault(name, Timer(name))


class Trainer:
    """Trains the model of a setup on this rank; the same seeds give the same weights and batches."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.rank = parallel_state.get_pipeline_model_parallel_rank()
        self.config = self._config()
        self.bare = [self._chunk(number) for number in range(setup.vp or 1)]
        self.chunks: list[Any] = list(self.bare)
        self.optimizer: Any = None
        self._jitter = random.Random(self.rank)
        if setup.overwrites:
            for chunk in self.bare:
                _overwrite(chunk)
        if setup.ddp == "none":
            self.optimizer = torch.optim.SGD([p for chunk in self.bare for p in chunk.parameters()], lr=0.1)
        else:
            self._wrap()

    def _config(self) -> Any:
        setup, dtype = self.setup, DTYPES[self.setup.dtype]
        config = {
            "num_layers": setup.pp * (setup.vp or 1),
            "hidden_size": 16,
            "num_attention_heads": 2,
            "use_cpu_initialization": True,
            "params_dtype": dtype,
            "pipeline_dtype": dtype,
            "bf16": setup.dtype == "bf16",
            "fp16": setup.dtype == "fp16",
            "tensor_model_parallel_size": setup.tp,
            "pipeline_model_parallel_size": setup.pp,
            "virtual_pipeline_model_parallel_size": setup.vp,
            "context_parallel_size": setup.cp,
            "expert_model_parallel_size": setup.ep,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "gradient_accumulation_fusion": False,
            "bias_dropout_fusion": False,
            "masked_softmax_fusion": False,
            "batch_p2p_comm": False,
            "overlap_p2p_comm": setup.vp is not None,
            "variable_seq_lengths": setup.ragged,
            "moe_token_dispatcher_type": "alltoall" if setup.ep > 1 or setup.ragged else "allgather",
            "timers": Timers() if setup.timers else None,
        }
        if setup.config.get("num_moe_experts"):
            config |= {"moe_router_topk": 2, "moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01}
            config |= {"moe_grouped_gemm": False, "add_bias_linear": False}
        return TransformerConfig(**(config | setup.config))

    def _chunk(self, number: int) -> nn.Module:
        setup, config, stages = self.setup, self.config, self.setup.pp
        is_first = self.rank == 0 and number == 0
        is_last = self.rank == stages - 1 and number == (setup.vp or 1) - 1
        # Copies of tied embeddings begin alike.
        torch.manual_seed(7 if setup.ties and (is_first or is_last) else 100 + number * stages + self.rank)
        spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False)
        if setup.cp > 1:
            spec.submodules.self_attention.submodules.core_attention = GatheringAttention
        own = {} if setup.vp is None else {"vp_stage": number}
        if config.mtp_num_layers:
            predicting = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, **own)
            own["mtp_block_spec"] = predicting
        model: Any = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=VOCABULARY,
            max_sequence_length=64,
            pre_process=is_first,
            post_process=is_last,
            share_embeddings_and_output_weights=setup.ties,
            **own,
        )
        if (
            config.defer_embedding_wgrad_compute
        ):  # of the output layer; Megatron's own layers, not TE's, take it for all
            now = replace(config, defer_embedding_wgrad_compute=False)
            for module in model.decoder.modules():
                if hasattr(module, "embedding_activation_buffer"):
                    module.config = now
        made: nn.Module = model.to(DTYPES[setup.dtype])
        return made

    def _wrap(self) -> None:
        setup, config, overlaps = self.setup, self.config, self.setup.ddp in ("overlap", "align")
        how = DistributedDataParallelConfig(
            overlap_grad_reduce=overlaps,
            use_distributed_optimizer=setup.shards_optimizer,
            overlap_param_gather=setup.gathers_parameters,
            bucket_size=2000 if overlaps else None,
            grad_reduce_in_fp32=True,
        )
        self.chunks = [DistributedDataParallel(config, how, chunk, disable_bucketing=False) for chunk in self.bare]

        def listed(name: str) -> Any:
            found = [getattr(chunk, name) for chunk in self.chunks]
            return found[0] if len(found) == 1 else found

        if overlaps:
            config.no_sync_func = listed("no_sync")
        if setup.ddp == "align":
            config.grad_sync_func = listed("start_grad_sync")
            if setup.gathers_parameters:
                config.param_sync_func = listed("start_param_sync")
        config.finalize_model_grads_func = finalize_model_grads
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-2,
                bf16=config.bf16,
                fp16=config.fp16,
                params_dtype=DTYPES[setup.dtype],
                loss_scale=128.0 if config.fp16 else None,
                use_distributed_optimizer=setup.shards_optimizer,
                overlap_param_gather=setup.gathers_parameters,
                clip_grad=1.0,
            ),
            self.chunks,
        )
        config.grad_scale_func = self.optimizer.scale_loss

    def batches(self, step: int) -> Iterator[dict[str, Tensor]]:
        """One a microbatch, of this replica."""
        replica = parallel_state.get_data_parallel_rank()
        generator = torch.Generator().manual_seed(1000 * step + replica)
        for m in range(self.setup.microbatches):
            length = LENGTH + (4 * ((m * 7 + step) % 5) if self.setup.ragged else 0)
            tokens = torch.randint(VOCABULARY, (2, length + 1), generator=generator)
            yield {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}

    def forward_step(
        self, data_iterator: Iterator[dict[str, Tensor]], model: nn.Module, *checkpoints: bool
    ) -> tuple[Tensor, Callable[..., Any]]:
        batch = next(data_iterator)
        length = batch["tokens"].shape[1]
        if self.setup.jitter:
            time.sleep(self._jitter.expovariate(1.0) / 200)
        # Of a sequence, what this rank of context parallelism has.
        part, rank = length // self.setup.cp, parallel_state.get_context_parallel_rank()
        own = slice(rank * part, (rank + 1) * part)
        mask = torch.ones(1, 1, length, length).triu(1).bool()[:, :, own]
        positions = torch.arange(length).expand(2, -1)[:, own]
        output: Tensor = model(batch["tokens"][:, own], positions, mask, labels=batch["labels"][:, own])
        return output, self.loss

    def loss(self, output: Tensor, non_loss_data: bool = False) -> Any:
        if non_loss_data:
            return {"mean": output.float().mean()}
        if self.config.calculate_per_token_loss:
            total = output.float().sum()
            return total, torch.tensor(output.numel(), dtype=torch.int), {"lm loss": total.detach().clone()}
        mean = output.float().mean()
        return mean, {"lm loss": mean.detach().clone()}

    def arguments(self, step: int) -> dict[str, Any]:
        """What Megatron's trainer passes to a schedule."""
        iterators = [self.batches(step) for _ in self.chunks]
        return {
            "forward_step_func": self.forward_step,
            "data_iterator": iterators if self.setup.vp else iterators[0],
            "model": self.chunks if self.setup.vp else self.chunks[0],
            "num_microbatches": self.setup.microbatches,
            "seq_length": LENGTH,
            "micro_batch_size": 2,
        }

    def step(self, run: Callable[..., list[Any]], number: int, **more: Any) -> dict[str, Tensor]:
        """Train a step; its losses, gradients and parameters on this rank, by name."""
        for chunk in self.chunks:
            if self.setup.ddp == "none":
                chunk.zero_grad(set_to_none=True)
            else:
                chunk.zero_grad_buffer()
        module: Any
        for module in self.modules():
            if type(module).__name__ == OVERWRITING:
                module.is_first_microbatch = self.setup.overwrites
        torch.manual_seed(number)
        stored = run(**self.arguments(number), **more)
        seen = {f"loss {m}": each["lm loss"].clone() for m, each in enumerate(stored)}
        for number_of_chunk, chunk in enumerate(self.bare):
            for name, parameter in chunk.named_parameters():
                gradient = parameter.grad if self.setup.ddp == "none" else parameter.main_grad  # type: ignore[attr-defined]
                if gradient is not None:
                    seen[f"gradient {number_of_chunk}.{name}"] = gradient.detach().clone()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for number_of_chunk, chunk in enumerate(self.bare):
            for name, parameter in chunk.named_parameters():
                seen[f"parameter {number_of_chunk}.{name}"] = parameter.detach().clone()
        return seen

    def evaluate(self, run: Callable[..., list[Any]], **more: Any) -> dict[str, Tensor]:
        """Run forwards alone; what is returned, by name."""
        torch.manual_seed(99)
        with torch.no_grad():
            stored = run(**self.arguments(99), forward_only=True, **more)
        return {f"{name} {m}": value for m, each in enumerate(stored) for name, value in each.items()}

    def modules(self) -> Iterator[nn.Module]:
        return (module for chunk in self.bare for module in chunk.modules())


class _Gathered(torch.autograd.Function):
    """The parts of all ranks of a group, one behind the other."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group, parts = group, [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        summed = gradients[0].clone()
        dist.all_reduce(summed, group=ctx.group)
        return summed.chunk(ctx.group.size())[ctx.group.rank()], None


class GatheringAttention(nn.Module):
    """Attention of a rank's own part of a sequence to all of it, in the place of TransformerEngine's."""

    def __init__(self, config: Any, **more: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **more: Any) -> Tensor:
        group = parallel_state.get_context_parallel_group()
        every = (_Gathered.apply(each, group) for each in (key, value))  # type: ignore[no-untyped-call]
        q, k, v = (each.permute(1, 2, 0, 3) for each in (query, *every))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=~mask)
        return attended.permute(2, 0, 1, 3).flatten(2)


def _overwrite(chunk: nn.Module) -> None:
    """In the backward of a microbatch for which the flag was set at its forward, let ``main_grad`` begin anew."""

    def flag(module: Any, inputs: Any, output: Any) -> None:
        if module.is_first_microbatch and torch.is_grad_enabled():
            output[0].register_hook(lambda gradient: (module.weight.main_grad.zero_(), None)[1])
        module.is_first_microbatch = False

    for module in chunk.modules():
        if type(module).__name__ == OVERWRITING:
            module.register_forward_hook(flag)
