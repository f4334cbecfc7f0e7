"""A tiny GPT of Megatron-core on CPUs: 2 stages of 2 model chunks, 2 replicas; losses to the bit Megatron's own.

    torchrun --nproc-per-node 4 examples/megatron_gpt.py            # readiness-driven
    torchrun --nproc-per-node 4 examples/megatron_gpt.py --stock    # Megatron's interleaved 1F1B

RRFP takes the two lines that say so; all else is Megatron's, as its trainer calls it, but for `megatron_on_cpu`, which
stands in for CUDA. It needs megatron-core 0.16.1: pip install 'rrfp[megatron]'.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import megatron_on_cpu  # type: ignore[import-not-found]  # noqa: F401 - before models are built
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

import rrfp.integrations.megatron as rm  # line 1 of RRFP's

STAGES, CHUNKS, MICROBATCHES, LENGTH, VOCABULARY = 2, 2, 8, 32, 128
LAYOUT = {"pipeline_model_parallel_size": STAGES, "virtual_pipeline_model_parallel_size": CHUNKS}


def model_chunks(config: Any) -> list[Any]:
    """This rank's chunks, wrapped as Megatron wraps them."""
    stage, chunks = parallel_state.get_pipeline_model_parallel_rank(), []
    how = DistributedDataParallelConfig(overlap_grad_reduce=True, use_distributed_optimizer=True)
    for number in range(CHUNKS):
        torch.manual_seed(number * STAGES + stage)
        is_first, is_last = stage == number == 0, (stage, number) == (STAGES - 1, CHUNKS - 1)
        layer = get_gpt_layer_local_spec()
        chunk = GPTModel(config, layer, VOCABULARY, LENGTH, pre_process=is_first, post_process=is_last, vp_stage=number)
        chunks.append(DistributedDataParallel(config, how, chunk))
    config.no_sync_func = [chunk.no_sync for chunk in chunks]
    config.finalize_model_grads_func = finalize_model_grads
    return chunks


def batches() -> Iterator[Tensor]:
    """Counts modulo the vocabulary, from where nobody knows."""
    generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    while True:
        yield (torch.randint(VOCABULARY, (4, 1), generator=generator) + torch.arange(LENGTH + 1)) % VOCABULARY


def forward_step(data_iterator: Iterator[Tensor], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """As in pretrain_gpt.py."""
    tokens = next(data_iterator)
    mask = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
    output = model(tokens[:, :-1], torch.arange(LENGTH).expand(4, -1), mask, labels=tokens[:, 1:])
    return output, lambda losses: (losses.mean(), {"lm loss": losses.mean().detach()})


def main() -> None:
    parser = argparse.ArgumentParser(description="a tiny GPT of Megatron-core")
    parser.add_argument("--stock", action="store_true", help="by Megatron's own schedule")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(**LAYOUT)
    if not args.stock:
        rm.enable()  # line 2
    model = {"num_layers": STAGES * CHUNKS, "hidden_size": 64, "num_attention_heads": 4}
    without = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "gradient_accumulation_fusion": False}
    on_cpu = {"use_cpu_initialization": True, "pipeline_dtype": torch.float32}
    exchange = {"overlap_p2p_comm": True, "batch_p2p_comm": False}  # as Megatron's schedule needs it with two stages
    config = TransformerConfig(**LAYOUT, **model, **without, **on_cpu, **exchange)
    chunks = model_chunks(config)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=3e-3, use_distributed_optimizer=True), chunks)
    config.grad_scale_func = optimizer.scale_loss
    iterators = [batches() for _ in chunks]
    sizes = {"num_microbatches": MICROBATCHES, "seq_length": LENGTH, "micro_batch_size": 4}
    for step in range(args.steps):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        train = get_forward_backward_func()
        losses = train(forward_step_func=forward_step, data_iterator=iterators, model=chunks, **sizes)
        optimizer.step()
        if losses and parallel_state.get_data_parallel_rank() == 0:
            print(f"step {step}: loss {sum(each['lm loss'].item() for each in losses) / len(losses):.8f}", flush=True)
    rm.disable()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
