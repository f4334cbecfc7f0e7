"""RRFP's tasks on Megatron's model chunks: `ChunkTasks`, which runs Megatron's own forward and backward steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from rrfp import AdoptedGradients, Batch, CallerModes, Payload, StageProgram, StepId, Task
from rrfp.errors import ConfigError, StageError
from rrfp.integrations.megatron.gradient_sync import GradientSync, ParameterSync
from rrfp.integrations.megatron.upstream import fitted, schedules


@dataclass(frozen=True, slots=True)
class StepCall:
    """The arguments of one call of ``forward_backward_func``, as the tasks need them, and what they leave behind."""

    chunks: Sequence[nn.Module]
    forward_step_func: Callable[..., Any]
    #: One for each chunk, passed on as they are: forwards of a chunk run in the order of microbatches.
    iterators: Sequence[Any]
    config: Any
    microbatches: int
    forward_only: bool
    collect_non_loss_data: bool
    first_val_step: bool | None
    cp_group_size: int
    model_type: Any
    gradients: GradientSync
    #: None in a call without backwards.
    parameters: ParameterSync | None
    #: On the last stage, by microbatch: what its loss function gave to be returned, and its number of tokens.
    stored: dict[int, list[Any]] = field(default_factory=dict)
    tokens: dict[int, Tensor] = field(default_factory=dict)


class ChunkTasks(StageProgram):
    """Runs F and B on the model chunks of this rank.

    It relies on natural order: of each kind on each chunk, microbatch 0 comes first and M - 1 last. Between two steps
    it holds nothing of the model, whose owner may drop it.
    """

    def __init__(self, names: Sequence[str], virtual_stages: Sequence[int], total: int) -> None:
        self._call: StepCall | None = None
        self.names = names
        self._chunk_of = {v: chunk for chunk, v in enumerate(virtual_stages)}
        self._last = total - 1

    @contextmanager
    def serving(self, call: StepCall) -> Iterator[None]:
        """Tasks of the step that runs within are those of ``call``."""
        self._call = call
        try:
            yield
        finally:
            self._call = None
            self._clear()

    def open(self, step: StepId, batch: Batch) -> None:
        self._modes = CallerModes.capture(step.mode)
        self._clear()

    def _clear(self) -> None:
        #: Of each microbatch between F and B: its input, and its output.
        self._kept: dict[tuple[int, int], tuple[Tensor | None, Any]] = {}
        #: Microbatches between F and B that checkpoint a part of their layers only.
        self._partial: set[tuple[int, int]] = set()
        self._adopted: dict[int, AdoptedGradients | None] = {}

    def forward(self, task: Task, inputs: tuple[Payload, ...]) -> Payload:
        return self._modes.forward(self._forward, task, inputs)

    def backward(self, task: Task, grads: tuple[Payload, ...]) -> tuple[Payload, ...]:
        return self._modes.backward(self._backward, task, grads)

    def name_of(self, virtual_stage: int) -> str:
        """See `rrfp.StageProgram.name_of`: the class of the chunk, without its wrappers."""
        return self.names[self._chunk_of[virtual_stage]]

    # On the lane's thread, in the caller's modes.

    def _forward(self, task: Task, inputs: tuple[Payload, ...]) -> Payload:
        _, m, v = task
        call, chunk = self._of_step, self._chunk_of[v]
        received = inputs[0].tensors[0] if inputs else None
        version = _version(received)
        entered = None if received is None else received.detach().requires_grad_(not call.forward_only)
        if m == 0 and call.parameters is not None:
            call.parameters.ahead_of(chunk)
        stored: list[Any] = []
        with record_function(f"PP:{v}F{m}"):
            output, tokens = self._forward_step(m, v, call, entered, stored)
        self._check_unwritten(v, "input", received, version)
        if v == self._last:
            call.stored[m], call.tokens[m] = stored, tokens
            payload = Payload()
        else:
            payload = self._sent(output, v)
        if not call.forward_only:
            self._kept[m, v] = entered, output
            # Its values live on in the payload until they have left.
            fitted(
                schedules.deallocate_output_tensor,
                out=output,
                deallocate_pipeline_outputs=call.config.deallocate_pipeline_outputs,
            )
        return payload

    def _forward_step(
        self, m: int, v: int, call: StepCall, entered: Tensor | None, stored: list[Any]
    ) -> tuple[Any, Tensor]:
        chunk, config = self._chunk_of[v], call.config
        try:
            output: tuple[Any, Tensor] = fitted(
                schedules.forward_step,
                forward_step_func=call.forward_step_func,
                data_iterator=call.iterators[chunk],
                model=call.chunks[chunk],
                num_microbatches=call.microbatches,
                input_tensor=entered,
                forward_data_store=stored,
                config=config,
                cp_group_size=call.cp_group_size,
                collect_non_loss_data=call.collect_non_loss_data,
                checkpoint_activations_microbatch=self._checkpoints_all(m, v, call),
                is_first_microbatch=schedules.check_first_val_step(call.first_val_step, call.forward_only, m == 0),
                current_microbatch=m,
                vp_stage=chunk if len(call.chunks) > 1 else None,
                is_last_stage=v == self._last,
            )
        except StopIteration:  # which would end a coroutine without a word
            raise StageError(
                f"data_iterator of chunk {chunk} ended at microbatch {m}: it must have one batch for each of the "
                f"{call.microbatches} microbatches of the call"
            ) from None
        return output

    def _checkpoints_all(self, m: int, v: int, call: StepCall) -> bool | None:
        """Whether all layers of a microbatch are checkpointed; None where the configuration leaves it to the model.

        Of the microbatches that a chunk holds, so many checkpoint only a part. Megatron's own rule, by the microbatch's
        number in its window, says the same of what its schedule holds.
        """
        few: int | None = call.config.num_microbatches_with_partial_activation_checkpoints
        if few is None:
            return None
        is_full = len(self._partial) >= few
        if not is_full and not call.forward_only:
            self._partial.add((m, v))
        return is_full

    def _sent(self, output: Any, v: int) -> Payload:
        if not isinstance(output, Tensor):
            raise StageError(
                f"{self.name_of(v)} on virtual stage {v} returned a {type(output).__name__}, must return a tensor: one "
                "goes from stage to stage"
            )
        return Payload.pack(output).sent()

    def _backward(self, task: Task, grads: tuple[Payload, ...]) -> tuple[Payload, ...]:
        _, m, v = task
        call, chunk = self._of_step, self._chunk_of[v]
        entered, output = self._kept.pop((m, v))
        self._partial.discard((m, v))
        received = grads[0].tensors[0] if grads else None
        version = _version(received)
        if v not in self._adopted:
            self._adopted[v] = _adopted(call.chunks[chunk])
        call.gradients.before_backward(chunk)
        with record_function(f"PP:{v}B{m}"):
            found = fitted(
                schedules.backward_step,
                input_tensor=entered,
                output_tensor=output,
                output_tensor_grad=received,
                model_type=call.model_type,
                config=call.config,
            )
        self._check_unwritten(v, "output gradient", received, version)
        sent: tuple[Payload, ...] = ()
        if entered is not None:
            # Without a gradient the stages before have nothing to differentiate, and learn it by zeros.
            sent = (Payload((torch.zeros_like(entered) if found is None else found,)).sent(),)
        if (adopted := self._adopted[v]) is not None:
            adopted.copy_out_of(adopted.memory_of((*grads, *sent)))
        call.gradients.after_backward(chunk)
        return sent

    def _check_unwritten(self, v: int, what: str, received: Tensor | None, version: int | None) -> None:
        if _version(received) != version:
            raise StageError(
                f"{self.name_of(v)} on virtual stage {v} wrote into its {what}, which comes from another stage and is "
                "read-only"
            )

    @property
    def _of_step(self) -> StepCall:
        assert self._call is not None, "a step runs"
        return self._call


def _version(tensor: Tensor | None) -> int | None:
    return None if tensor is None or tensor.is_inference() else tensor._version


def _adopted(chunk: nn.Module) -> AdoptedGradients | None:
    """None where gradients are added to ``main_grad``: then no ``.grad`` lives longer than a backward."""
    trained = (parameter for parameter in chunk.parameters() if parameter.requires_grad)
    return None if all(hasattr(parameter, "main_grad") for parameter in trained) else AdoptedGradients(chunk)


def listed_iterators(data_iterator: Any, chunks: int) -> list[Any]:
    """What each chunk draws from, as it was passed; a ConfigError where their number is not that of the chunks."""
    if not isinstance(data_iterator, list):
        if chunks > 1:
            raise ConfigError(
                f"data_iterator is a {type(data_iterator).__name__}, must be a list with one iterator for each of the "
                f"{chunks} model chunks"
            )
        return [data_iterator]
    if len(data_iterator) != chunks:
        raise ConfigError(
            f"data_iterator has {len(data_iterator)} iterators, must have one for each model chunk: {chunks}"
        )
    shared = {id(each): each for each in data_iterator if hasattr(each, "__next__") and data_iterator.count(each) > 1}
    drawn: dict[int, int] = {}
    return [
        _SharedIterator(each, chunk, drawn) if id(each) in shared else each for chunk, each in enumerate(data_iterator)
    ]


class _SharedIterator:
    """An iterator that several chunks were given: one of them may draw, as the order between chunks is free."""

    def __init__(self, source: Iterator[Any], chunk: int, drawn: dict[int, int]) -> None:
        self._source = source
        self._chunk = chunk
        #: By iterator, the chunk that draws from it.
        self._drawn = drawn

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        first = self._drawn.setdefault(id(self._source), self._chunk)
        if first != self._chunk:
            raise StageError(
                f"chunks {first} and {self._chunk} draw from one data_iterator, and forwards of chunks run in any "
                "order: each must have an iterator of its own"
            )
        return next(self._source)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)
