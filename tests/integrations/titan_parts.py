"""A configuration of torchtitan's trainer for a CPU, what its optimizers saw, and one process to compare it with."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import integrations.titan_on_cpu
import torch
import torch.distributed as dist
import torchtitan.distributed.pipeline_parallel as titan
from torch import Tensor
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

__all__ = ["integrations", "titan"]

WORDS, LENGTH = 2048, 16
STEPS, MICROBATCHES = 3, 8

#: What the page tells users of FSDP on a CPU to do once the trainer is made.
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "torch-pipelining.md"
(ON_CPU,) = re.findall(r'```python title="on a CPU"\n(.*?)```', PAGE.read_text(), re.DOTALL)


class Tokens(BaseDataLoader):  # type: ignore[misc]
    """Random words, the same ones in each loader of a replica."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        infinite: bool = True

    def __init__(self, config: Config, *, dp_rank: int, seq_len: int, local_batch_size: int, **others: Any) -> None:
        self.generator = torch.Generator().manual_seed(5 + dp_rank)
        self.shape = local_batch_size, seq_len

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        rows, length = self.shape
        while True:
            words = torch.randint(0, WORDS, (rows, length + 1), generator=self.generator)
            labels = words[:, 1:].clone()
            labels[:, : int(words[0, 0]) % length] = -100  # microbatches have unequal numbers of labels
            yield {"input": words[:, :-1], "positions": torch.arange(length).expand(rows, length)}, labels

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class NoTokenizer(BaseTokenizer):  # type: ignore[misc]
    """The loader makes words, not text."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return WORDS


class CutInterleaved(ScheduleInterleaved1F1B):
    """torch's schedule, with the microbatches that this torchtitan cuts itself, which torch 2.13 does not take."""

    def step(
        self,
        *args: Any,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        loss_kwargs: dict[str, Any] | None = None,
        return_outputs: bool = True,
        **kwargs: Any,
    ) -> None:
        for stage in self._stages:
            stage.has_backward = self._has_backward
            stage.clear_runtime_states()
        self._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs)


@dataclass
class Seen:
    """What a run of the trainer leaves: everything by step.

    Attributes:
        gradients: by parameter's name, as the optimizers get them: clipped.
        losses: by microbatch, on the rank of the last stage; of a validation too, in ``validated``.
        norms: of the gradients before they were clipped.
    """

    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    validated: list[Tensor] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


def config(schedule: str, recomputes: Any = SelectiveAC, **parallelism: Any) -> Trainer.Config:
    """Three steps of torchtitan's debug model with clipped gradients, and validations in the first two.

    Args:
        schedule: its name.
        recomputes: the kind of activation checkpointing.
        parallelism: other values of that part.
    """
    spec = model_registry("debugmodel")
    for layer in spec.model.layers:  # its default, FlexAttention, is compiled for a GPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return Trainer.Config(
        loss=CrossEntropyLoss.Config(),
        model_spec=replace(spec, state_dict_adapter=None),
        optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=1),
        tokenizer=NoTokenizer.Config(),
        dataloader=Tokens.Config(),
        training=TrainingConfig(
            local_batch_size=MICROBATCHES,
            seq_len=LENGTH,
            steps=STEPS,
            max_norm=0.5,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(
            **{"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": schedule, **parallelism}
        ),
        activation_checkpoint=recomputes.Config(),
        metrics=MetricsProcessor.Config(log_freq=1),
        validator=Validator.Config(enable=True, freq=2, steps=1, dataloader=Tokens.Config()),
        debug=DebugConfig(seed=3, enable_structured_logging=False),
    )


def named(part: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters with the names that they have without activation checkpointing."""
    for name, parameter in part.named_parameters():
        yield name.replace("_checkpoint_wrapped_module.", ""), parameter


def full(tensor: Any) -> Tensor:
    """The whole of a DTensor; a collective."""
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()


class Watched(Trainer):  # type: ignore[misc]
    """torchtitan's trainer, which keeps what its optimizers and its metrics get."""

    def __init__(self, config: Trainer.Config) -> None:
        super().__init__(config)
        exec(ON_CPU, {"trainer": self})
        self.seen = Seen()
        for part, optimizer in zip(self.model_parts, self.optimizers.optimizers, strict=True):
            optimizer.register_step_pre_hook(self._keep_of(part, part is self.model_parts[0]))
        self.pp_schedule.step = self._kept(self.pp_schedule.step)
        log = self.metrics_processor.log

        def logged(step: int, loss: float, largest: float, norm: float, **others: Any) -> None:
            self.seen.norms.append(norm)
            log(step, loss, largest, norm, **others)

        self.metrics_processor.log = logged

    def _keep_of(self, part: torch.nn.Module, is_first: bool) -> Callable[..., None]:
        def keep(*args: Any) -> None:
            if is_first:
                self.seen.gradients.append({})
            for name, parameter in named(part):
                self.seen.gradients[-1][name] = full(parameter.grad)

        return keep

    def _kept(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def step(**arguments: Any) -> Any:  # `eval` calls it, too
            result = call(**arguments)
            if arguments["losses"] is not None:
                into = self.seen.losses if torch.is_grad_enabled() else self.seen.validated
                into.append(torch.stack(arguments["losses"]).detach())
            return result

        return step


def weights(trainer: Trainer) -> dict[str, Tensor]:
    """The whole model's, by name, on every rank."""
    own = {name: full(value) for part in trainer.model_parts for name, value in named(part)}
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    return {name: value for part in parts for name, value in part.items()}


def one_process(config: Trainer.Config, start: dict[str, Tensor]) -> Seen:
    """The same steps of the whole model, one microbatch after the other, with torchtitan's loss and optimizer."""
    seen = Seen()
    assert config.model_spec is not None
    model: Any = config.model_spec.model.build()
    model.init_weights(buffer_device=None)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(start[name])
    loss_fn = config.loss.build(compile_config=config.compile)
    optimizers = config.optimizer.build(model_parts=[model])
    rates = config.lr_scheduler.build(optimizers=optimizers, training_steps=STEPS)

    def losses(batches: list[Any], tokens: Tensor | None) -> Iterator[Tensor]:
        for words, labels in batches:
            yield loss_fn(model(words["input"], positions=words["positions"]), labels, tokens)[0]

    def loader() -> Iterator[Any]:
        return iter(config.dataloader.build(dp_rank=0, seq_len=LENGTH, local_batch_size=1))

    batches = loader()
    for step in range(1, STEPS + 1):
        optimizers.zero_grad()
        group = [next(batches) for _ in range(MICROBATCHES)]
        tokens = torch.tensor(sum(int((labels != -100).sum()) for _, labels in group))
        kept = []
        for loss in losses(group, tokens):
            loss.backward()  # type: ignore[no-untyped-call]
            kept.append(loss.detach())
        seen.losses.append(torch.stack(kept))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.max_norm)
        seen.norms.append(float(norm))
        seen.gradients.append({name: full(parameter.grad) for name, parameter in model.named_parameters()})
        optimizers.step()
        rates.step()
        if step == 1 or step % config.validator.freq == 0:
            own = loader()
            with torch.no_grad():
                validated = list(losses([next(own) for _ in range(MICROBATCHES)], None))
            seen.validated.append(torch.stack(validated))
    return seen


def interleaved() -> Trainer.Config:
    """For torchtitan's command line, which may choose another schedule."""
    return config("Interleaved1F1B")
