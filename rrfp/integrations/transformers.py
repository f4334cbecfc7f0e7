"""`PipelineTrainer`: a `transformers.Trainer` whose model is a pipeline, in one process and under torchrun."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any, Self

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

import rrfp
from rrfp.errors import ConfigError, RrfpError
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


class PipelineTrainer(Trainer):  # type: ignore[misc]
    """A `transformers.Trainer` over the stages of a model: all in this process, or under torchrun one on each rank.

    It is entered: ``with PipelineTrainer(...) as trainer: trainer.train()``. A batch of the loader is a step of the
    pipeline, so ``per_device_train_batch_size`` is that of all ranks together, which load the same batches.

    Args:
        model: a causal language model. Under torchrun it keeps this rank's weights; the others go to the meta device.
        args: as of `transformers.Trainer`, but for those in `REFUSED`.
        stages: ``rrfp.split(model, n)``, under torchrun for as many stages as ranks. Keep no other reference to them.
        microbatches: into how many parts each batch is cut.
        options: of `rrfp.Pipeline`, such as ``{"limit": "n"}``.
        arguments: further ones of `transformers.Trainer`.

    Raises:
        ConfigError: for an argument that is refused or does not fit; names it.
    """

    _group: dist.ProcessGroup | None = None
    _is_compared = _is_entered = False

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        *,
        stages: Split,
        microbatches: int,
        options: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        check(model, args, stages, microbatches, arguments)
        check_overrides(type(self))
        self.microbatches = microbatches
        self._chunks = [chunk for stage in stages for chunk in stage.chunks]
        build: Callable[..., Any] = stages.local
        if args.world_size > 1:
            own = stages[args.process_index]
            self._chunks, build = list(own.chunks), own.pipeline
            self._group = dist.new_group(backend="gloo")
            forget_others(model, own.chunks)
        super().__init__(model, as_one_process(args), **arguments)
        self.pipe = build(**(options or {})).blocking()

    def __enter__(self) -> Self:
        self.pipe.__enter__()
        self._is_entered = True
        return self

    def __exit__(self, *error: Any) -> None:
        self.pipe.__exit__(*error)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.clip_grad_norm_ = lambda parameters, max_norm, *_: self.pipe.clip_grad_norm_(max_norm)
        skip_model_preparation(self.accelerator)
        if self._group is not None:
            make_one_process(self.accelerator)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        for module in [*self._chunks, *([model] if self._group is None else [])]:
            module.to(device)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        self.optimizer.train()
        batch = self._cut(inputs, training=True)
        tokens, batches = sum(batch["weights"]), self.current_gradient_accumulation_steps
        if not tokens:  # a mean over nothing: it adds no gradients
            return torch.zeros((), device=self.args.device)
        share = 1 / batches if num_items_in_batch is None else tokens / float(num_items_in_batch)
        with self.accelerator.autocast():
            result = self.pipe.step(**batch, grad_scale=share)
        return torch.tensor(result.loss * share, device=self.args.device)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        batch = self._cut(inputs, training=False)
        if not any(batch["weights"]):
            del batch["weights"]  # the loss is nan, as a Trainer's
        with self.accelerator.autocast():
            result = self.pipe.evaluate(**batch, return_outputs=not prediction_loss_only)
        loss = torch.tensor(result.loss, device=self.args.device)
        if prediction_loss_only:
            return loss, None, None
        own = torch.cat([result.outputs[m].logits.cpu() for m in sorted(result.outputs)]) if result.outputs else None
        (logits,) = (each.to(self.args.device) for each in self._from_all(own) if each is not None)
        return loss, logits, batch["targets"]

    def _cut(self, inputs: dict[str, Any], *, training: bool) -> dict[str, Any]:
        """The arguments of a step of the pipeline, for a batch of the loader."""
        if not self._is_entered:
            raise RrfpError("this trainer is not entered: with PipelineTrainer(...) as trainer: trainer.train()")
        for chunk in self._chunks:
            chunk.train(training)
        batch = step_arguments(dict(self._prepare_inputs(inputs)), self.microbatches)
        labels = batch["targets"]
        if not self._is_compared and any(each != labels.tolist() for each in self._from_all(labels.tolist())):
            raise ConfigError("the dataset gives other samples on other ranks, must give the same on all")
        self._is_compared = True
        return batch

    def _from_all(self, value: Any) -> list[Any]:
        values = [value] * (1 if self._group is None else dist.get_world_size(self._group))
        if self._group is not None:
            dist.all_gather_object(values, value, group=self._group)
        return values

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, state_dict if self._group is None else whole_state_dict(self.model, self._group))
        self._from_all(None)  # rank 0 has written

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:  # all ranks draw the same
            super()._save_rng_state(output_dir)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder, extra = f"{output_dir}/pipeline", self.lr_scheduler.state_dict()
        rrfp.checkpoint.save(folder, self._chunks, self.optimizer.optimizer, pipe=self.pipe, extra=extra)

    def _load_from_checkpoint(self, *_: Any) -> None:
        """Nothing: `_load_optimizer_and_scheduler` loads the weights, too."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.lr_scheduler.load_state_dict(self._load(checkpoint, self.optimizer.optimizer))

    def _load_best_model(self) -> None:
        state = self.pipe.state_dict()
        self._load(self.state.best_model_checkpoint)
        self.pipe.load_state_dict(state)

    def _load(self, output_dir: str, optimizer: Any = None) -> Any:
        loaded = rrfp.checkpoint.load(f"{output_dir}/pipeline", self._chunks, optimizer, pipe=self.pipe)
        if loaded is None:
            raise ConfigError(f"checkpoint {output_dir} has no complete folder 'pipeline', must have one to be resumed")
        return loaded.extra


def forget_others(model: nn.Module, chunks: Iterable[nn.Module]) -> None:
    """Move parameters and saved buffers of ``model`` that no chunk has to the meta device; no optimizer steps them."""
    own = {id(value) for chunk in chunks for value in chunk.state_dict(keep_vars=True).values()}
    moved: dict[int, Tensor] = {}  # a tied parameter stays one
    state = model.state_dict(keep_vars=True)
    for name, value in state.items():
        if id(value) in own:
            continue
        if id(value) not in moved:
            meta = value.detach().to("meta")
            moved[id(value)] = nn.Parameter(meta, False) if isinstance(value, nn.Parameter) else meta
        module, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(module), attribute, moved[id(value)])


def whole_state_dict(model: nn.Module, group: dist.ProcessGroup) -> dict[str, Tensor] | None:
    """The state dict of the whole model, on the CPU of rank 0; None on the others.

    ``model`` lacks what other ranks hold (`forget_others`), and ``group`` has all ranks, for tensors on the CPU. One
    tensor after the other is sent, so no rank needs memory for more than the model.
    """
    state, rank = model.state_dict(), dist.get_rank(group)
    held: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(held, {name for name, value in state.items() if not value.is_meta}, group=group)
    whole = dict[str, Tensor]()
    for name, value in state.items():
        source = next(rank for rank, names in enumerate(held) if name in names)
        if rank == source:
            whole[name] = value.cpu().contiguous()
            if source != 0:
                dist.send(whole.pop(name), 0, group)
        elif rank == 0:
            whole[name] = torch.empty_like(value, device="cpu", memory_format=torch.contiguous_format)
            dist.recv(whole[name], source, group)
    return whole if rank == 0 else None


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


def check_overrides(trainer: type[Trainer]) -> None:
    """Raise a ConfigError for methods of a subclass that a pipeline would not call."""
    for name in ("compute_loss", "compute_loss_context_manager"):
        if getattr(trainer, name) is not getattr(Trainer, name):
            wanted = "pass options={'loss_fn': ...}" if name == "compute_loss" else "enter it around train()"
            raise ConfigError(f"{trainer.__name__} overrides {name}, which a PipelineTrainer does not call: {wanted}")


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


def skip_model_preparation(accelerator: Accelerator) -> None:
    """Let accelerate leave the model as it is: no part of it has the forward that accelerate gives the whole."""

    def prepare_model(model: nn.Module, **_: Any) -> nn.Module:
        accelerator._models.append(model)  # or the Trainer would prepare it before each evaluation
        return model

    accelerator.prepare_model = prepare_model


def make_one_process(accelerator: Accelerator) -> None:
    """Let accelerate, which takes ranks for replicas, leave batches and results as they are on each rank."""
    accelerator.gather = accelerator.pad_across_processes = lambda value, **_: value
    config = accelerator.dataloader_config
    given = {name: getattr(config, name) for name in ("use_seedable_sampler", "data_seed", "non_blocking")}
    given |= {"num_processes": 1, "process_index": 0, "put_on_device": True, "dispatch_batches": False}
    accelerator.prepare_data_loader = lambda loader, **_: prepare_data_loader(loader, accelerator.device, **given)
