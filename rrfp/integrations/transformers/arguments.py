"""Arguments of a `transformers.Trainer` over a pipeline: those it may have, and all ranks as one process."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers import TrainingArguments

from rrfp.errors import ConfigError
from rrfp.integrations.splitting.stages import Split
from rrfp.plain import whole

#: Arguments that must keep their default, by what to do instead, or why.
REFUSED = {
    "the pipeline distributes the model": ("deepspeed", "fsdp", "parallelism_config"),
    "set it up on the model before rrfp.split": ("activation_checkpointing", "torch_compile", "use_liger_kernel"),
    "convert the model before rrfp.split": ("bf16_full_eval", "fp16_full_eval"),
    "pass options={'loss_fn': ...}": ("compute_loss_func", "label_smoothing_factor"),
    "the stages' modules are called, not the model": ("debug", "neftune_noise_alpha", "optim_target_modules"),
    "all ranks must do the same": ("auto_find_batch_size", "enable_jit_checkpoint", "save_on_each_node"),
    "a pipeline does without": ("eval_use_gather_object", "model_init", "torch_empty_cache_steps"),
    "use bf16": ("fp16",),
}


def check(
    model: nn.Module, args: TrainingArguments, stages: Any, microbatches: Any, arguments: Mapping[str, Any]
) -> None:
    whole("microbatches", microbatches, 1)
    if not isinstance(stages, Split) or stages.loss_fn is None:
        raise ConfigError(
            f"stages is a {type(stages).__name__}, must be rrfp.split(model, n) of a causal language model"
        )
    own = set(model.parameters())
    if not all(own.issuperset(chunk.parameters()) for stage in stages for chunk in stage.chunks):  # none would train
        raise ConfigError("stages has parameters that are not model's, must be rrfp.split(model, n) of this very model")
    if args.world_size not in (1, len(stages)):
        raise ConfigError(
            f"stages is a split into {len(stages)}, must be into as many as there are ranks: {args.world_size}"
        )
    if args.save_only_model and args.load_best_model_at_end:
        raise ConfigError("save_only_model and load_best_model_at_end are both True, must be one of them")
    for reason, names in REFUSED.items():
        for name in names:
            if value := arguments.get(name) or getattr(args, name, None):
                raise ConfigError(f"{name} is {value!r}, must not be set with a PipelineTrainer: {reason}")


def step_arguments(batch: dict[str, Any], microbatches: int) -> dict[str, Any]:
    """Those of a step of the pipeline, for a batch of the loader."""
    if not isinstance(labels := batch.pop("labels", None), Tensor):
        raise ConfigError("a batch has no tensor 'labels', must have one: see data_collator")
    parts = labels.tensor_split(min(microbatches, len(labels)))
    weights = [int((part[:, 1:] != -100).sum()) for part in parts]
    return {"inputs": batch, "targets": labels, "weights": weights, "microbatches": len(parts)}


def as_one_process(args: TrainingArguments) -> TrainingArguments:
    """A copy for which all ranks are one process, of which rank 0 writes and logs."""
    own = copy.copy(args)
    own._n_gpu = min(args.n_gpu, 1)  # of more the Trainer would make replicas
    rank = {"process_index": args.process_index, "local_process_index": args.local_process_index}
    own.distributed_state = SimpleNamespace(num_processes=1, distributed_type=DistributedType.NO, **rank)
    return own


def make_one_process(accelerator: Accelerator) -> None:
    """Let accelerate, which takes ranks for replicas, leave model, batches and results as they are on each rank."""

    def prepare_model(model: nn.Module, **_: Any) -> nn.Module:
        accelerator._models.append(model)  # or the Trainer would prepare it before each evaluation
        return model

    accelerator.prepare_model = prepare_model
    accelerator.gather = accelerator.pad_across_processes = lambda value, **_: value
    config = accelerator.dataloader_config
    given = {name: getattr(config, name) for name in ("use_seedable_sampler", "data_seed", "non_blocking")}
    given |= {"num_processes": 1, "process_index": 0, "put_on_device": True, "dispatch_batches": False}
    accelerator.prepare_data_loader = lambda loader, **_: prepare_data_loader(loader, accelerator.device, **given)
