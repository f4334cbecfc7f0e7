"""RRFP's tasks on torch's stages: `StageTasks`, the `rrfp.StageProgram` behind `ScheduleRRFP`."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from rrfp import AdoptedGradients, Batch, CallerModes, Mode, Payload, SplitBackward, StageProgram, StepId, Task
from rrfp.errors import StageError
from rrfp.integrations.torch import private
from rrfp.integrations.torch.private import Stage

P = ParamSpec("P")
T = TypeVar("T")

#: The first line of torch's wrappers.
_WRAPPER = re.compile(r"\s*(\[Stage \d+\] failed to run forward:|Failed to run stage backward)")


def unwrapped(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of ``call``, of torch's.

    What the caller's module raises in it passes as it was raised, with a note that has torch's text: the arguments.
    """
    try:
        return call(*args, **kwargs)
    except RuntimeError as error:
        cause, text = error.__cause__, str(error)
        if not isinstance(cause, Exception) or not _WRAPPER.match(text):
            raise
    cause.add_note(" ".join(text.split()))
    raise cause


#: What a split backward does with a module that differentiates only as a whole.
Unsplittable = Literal["whole", "refuse"]


@dataclass(frozen=True, slots=True)
class StepData:
    """The caller's data for one step: lists by microbatch."""

    #: Positional arguments of the first stage.
    args: Sequence[tuple[Any, ...]]
    #: Keyword arguments of every stage of this rank.
    kwargs: Sequence[dict[str, Any]]
    #: Second argument of the loss; None where no loss is computed.
    targets: Sequence[Any] | None
    #: ``loss(output, target)``; None where no loss is computed.
    loss: Callable[[Any, Any], Tensor] | None
    #: Whether the outputs of the last stage are wanted.
    keeps_outputs: bool
    #: Whether FSDP's gradients are reduced at the end.
    finalizes: bool


class StageTasks(StageProgram):
    """Runs F, B and W on the stages of this rank, which are ascending.

    With ``split`` a backward leaves the gradients of weights to W; where that cannot be, it does as ``unsplittable`` of
    `rrfp.SplitBackward` says. The gradients of a step are divided by ``divisor`` once all are formed.
    """

    def __init__(self, stages: Sequence[Stage], *, split: Unsplittable | None, divisor: int) -> None:
        self.data: StepData | None = None
        self.step_losses: dict[int, Tensor] = {}
        self.step_outputs: dict[int, Any] = {}
        self._stages = {stage.stage_index: stage for stage in stages}
        #: Of stages whose weights have work of their own, torch's.
        self._splits = {
            # Reductions are off in all backwards of a step: `_reduce` runs them.
            stage.stage_index: SplitBackward(stage.submod, stage.stage_index, split, may_reduce=False)
            for stage in stages
            if split is not None and stage.dw_builder is None
        }
        self._is_split = split is not None
        self._divisor = divisor

    def open(self, step: StepId, batch: Batch) -> None:
        # With backward_requires_autograd=False a training step may run under no_grad, all of it.
        self._modes = CallerModes.capture(step.mode if torch.is_grad_enabled() else Mode.FORWARD)
        self.step_losses.clear()
        self.step_outputs.clear()
        #: The stage that made one of these, which, its tensor, and torch's count of the writes then.
        self._kept: list[tuple[Stage, str, int, Tensor, int | None]] = []
        self._received: dict[tuple[int, int], tuple[Tensor | None, ...]] = {}
        #: By microbatch and stage: the work that B has left to W, and the addresses in which no gradient may lie.
        self._left: dict[tuple[int, int], tuple[Callable[[], None], frozenset[int]]] = {}
        self._adopted: dict[int, AdoptedGradients] = {}
        #: Of stages with a dw_builder, the microbatches whose B has run and whose W has not, in the order of their Bs.
        self._before_weight: dict[int, deque[int]] = {v: deque() for v in self._stages}
        #: The stages to reduce, deepest first, and those whose gradients are formed.
        self._to_reduce = deque(sorted(self._stages, reverse=True))
        self._formed: set[int] = set()

    def forward(self, task: Task, inputs: tuple[Payload, ...]) -> Payload:
        return self._modes.forward(self._forward, task, inputs)

    def backward(self, task: Task, grads: tuple[Payload, ...]) -> tuple[Payload, ...]:
        return self._modes.backward(self._backward, task, grads)

    def weight(self, task: Task) -> None:
        self._modes.backward(self._weight, task)

    def finish(self, virtual_stage: int) -> None:
        """See `rrfp.StageProgram.finish`. Reduces in the same order on all replicas, however stages finish."""
        # Replicas are pipelines of their own, and their stages share process groups. Deepest first ends: the rank
        # of a stage that waits for its replica has run every task of deeper stages.
        self._formed.add(virtual_stage)
        while self._to_reduce and self._to_reduce[0] in self._formed:
            self._modes.backward(self._reduce, self._stages[self._to_reduce.popleft()])

    def name_of(self, virtual_stage: int) -> str:
        return type(self._stages[virtual_stage].submod).__name__

    def losses(self) -> Mapping[int, float]:
        """See `rrfp.StageProgram.losses`. None where one is no ordinary scalar, as a DTensor or an evaluation's."""
        for stage, what, microbatch, tensor, version in self._kept:
            if _version(tensor) != version:
                name = f"{type(stage.submod).__name__} on stage {stage.stage_index}"
                raise StageError(
                    f"{name}{what} of microbatch {microbatch} after it had returned it: return a clone (x.clone())"
                )
        if not all(private.is_plain_scalar(loss) for loss in self.step_losses.values()):
            return {}
        return {m: float(loss.detach()) for m, loss in self.step_losses.items()}

    # On the lane's thread, in the caller's modes.

    def _forward(self, task: Task, inputs: tuple[Payload, ...]) -> Payload:
        _, m, v = task
        stage, data = self._stages[v], self._of_step
        with private.record_function(f"PP:{v}F{m}"):
            if inputs:
                received = inputs[0].tensors
                versions = _versions(received)
                private.put_inputs(stage, m, received)
            # torch would list outputs in the order in which microbatches ran.
            output = unwrapped(stage.forward_one_chunk, m, data.args[m], data.kwargs[m], save_forward_output=False)
            if inputs:
                _check_unwritten(stage, received, versions)
                private.drop_inputs(stage, m)
                if stage.has_backward:
                    self._received[m, v] = received
            if is_last := stage.is_last:
                self._keep(stage, m, output, data)
        payload = Payload() if is_last else _sent_output(stage, output)
        if not stage.has_backward:  # torch would keep inputs and outputs of all microbatches
            stage.clear_runtime_states()
        return payload

    def _keep(self, stage: Stage, microbatch: int, output: Any, data: StepData) -> None:
        if data.loss is not None:
            target = None if data.targets is None else data.targets[microbatch]
            self.step_losses[microbatch] = data.loss(output, target)
            self._watch(stage, ", or loss_fn, wrote into the loss", microbatch, self.step_losses[microbatch])
        if data.keeps_outputs:
            self.step_outputs[microbatch] = output
            self._watch(stage, " wrote into the output", microbatch, output)

    def _watch(self, stage: Stage, what: str, microbatch: int, value: Any) -> None:
        """A later task must not write into the tensors of ``value``, which the caller will get."""
        tensors = private.tensors_in(value)
        self._kept += [(stage, what, microbatch, tensor, _version(tensor)) for tensor in tensors]

    def _backward(self, task: Task, grads: tuple[Payload, ...]) -> tuple[Payload, ...]:
        _, m, v = task
        stage = self._stages[v]
        if v not in self._adopted:  # not before the first forward, in which FSDP2 gathers the parameters
            self._adopted[v] = AdoptedGradients(stage.submod)
        with private.record_function(f"PP:{v}{'I' if self._is_split else 'B'}{m}"):
            if grads:
                private.put_gradients(stage, m, grads[0].tensors)
            loss = self.step_losses[m] if stage.is_last else None
            work = self._differentiate(stage, m, loss)
            gradients = private.take_gradients(stage, m)
        received = self._received.pop((m, v), ())
        sent = (Payload(tuple(map(_sent_gradient, gradients, received))).sent(),) if received else ()
        memory = self._adopted[v].memory_of((*grads, *sent))
        if work is None:
            self._adopted[v].copy_out_of(memory)
        else:
            self._left[m, v] = (work, memory)
        return sent

    def _differentiate(self, stage: Stage, m: int, loss: Tensor | None) -> Callable[[], None] | None:
        """Run B; returns the work left to W, None if there is none."""
        if (split := self._splits.get(stage.stage_index)) is None:
            unwrapped(stage.backward_one_chunk, m, loss=loss, full_backward=not self._is_split, last_backward=False)
            if not self._is_split:
                return None
            self._before_weight[stage.stage_index].append(m)
            return partial(unwrapped, stage.backward_weight_one_chunk, m, last_backward=False)
        pending: list[Callable[[], None]] = []

        def run(roots: Sequence[Tensor], gradients: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
            if (left := split.run(roots, gradients, inputs)) is not None:
                pending.append(left.add_to_gradients)

        unwrapped(private.backward_one_chunk, stage, m, loss, run)
        return pending[0] if pending else None

    def _weight(self, task: Task) -> None:
        _, m, v = task
        stage = self._stages[v]
        if stage.dw_builder is not None:  # it may hand out its runners first in, first out
            m = self._before_weight[v].popleft()
        if (left := self._left.pop((m, v), None)) is None:
            return
        work, memory = left
        with private.record_function(f"PP:{v}W{m}"), private.unreduced(stage):
            work()
        self._adopted[v].copy_out_of(memory)

    def _reduce(self, stage: Stage) -> None:
        if isinstance(stage.submod, DistributedDataParallel):
            private.reduce_ddp(stage)
        if self._of_step.finalizes or not isinstance(stage.submod, FSDPModule):
            stage.perform_reduce_grad(self._divisor)

    @property
    def _of_step(self) -> StepData:
        assert self.data is not None, "a step runs"
        return self.data


def _sent_output(stage: Stage, output: Any) -> Payload:
    try:
        return Payload.pack(tuple(map(private.local_shard, private.outputs_of(output)))).sent()
    except StageError as error:
        raise StageError(f"{type(stage.submod).__name__} on stage {stage.stage_index}: {error}") from None


def _sent_gradient(gradient: Tensor | None, received: Tensor | None) -> Tensor | None:
    """The gradient of a received tensor as it is sent: zeros where the loss does not depend on it."""
    if gradient is None:
        return None if received is None or not received.requires_grad else torch.zeros_like(received)
    return private.local_shard(gradient)


def _versions(tensors: Sequence[Tensor | None]) -> list[int | None]:
    return [None if tensor is None else _version(tensor) for tensor in tensors]


def _version(tensor: Tensor) -> int | None:
    """Torch's count of the writes into ``tensor``; an inference tensor has none."""
    return None if tensor.is_inference() else tensor._version


def _check_unwritten(stage: Stage, received: Sequence[Tensor | None], versions: list[int | None]) -> None:
    """Refuse a module that wrote into a received tensor: its memory may have other readers."""
    if (now := _versions(received)) != versions:
        index = next(index for index, version in enumerate(now) if version != versions[index])
        raise StageError(
            f"{type(stage.submod).__name__} on stage {stage.stage_index} wrote into its input {index}, which comes "
            "from another stage and is read-only; use an out-of-place operation, or clone it first (x = x.clone())"
        )
