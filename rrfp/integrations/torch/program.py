"""RRFP's tasks on torch's stages: `StageTasks`, the `rrfp.StageProgram` behind `ScheduleRRFP`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from rrfp import AdoptedGradients, Batch, CallerModes, Mode, Payload, StageProgram, StepId, Task
from rrfp.errors import StageError
from rrfp.integrations.torch import private
from rrfp.integrations.torch.causes import unwrapped
from rrfp.integrations.torch.private import Stage


@dataclass(frozen=True, slots=True)
class StepData:
    """The caller's data for one step: lists by microbatch.

    Attributes:
        args: positional arguments of the first stage.
        kwargs: keyword arguments of every stage of this rank.
        targets: second argument of the loss; None where no loss is computed.
        loss: ``loss(output, target)``; None where no loss is computed.
        keeps_outputs: whether the outputs of the last stage are wanted.
        finalizes: whether FSDP's gradients are reduced at the end.
    """

    args: Sequence[tuple[Any, ...]]
    kwargs: Sequence[dict[str, Any]]
    targets: Sequence[Any] | None
    loss: Callable[[Any, Any], Tensor] | None
    keeps_outputs: bool
    finalizes: bool


class StageTasks(StageProgram):
    """Runs F, B and W on the stages of this rank.

    Args:
        stages: by index, ascending.
        microbatches: M.
        split: whether a backward leaves the gradients of weights to W.
        divisor: of the gradients of a step, once all are formed.

    Attributes:
        data: of the step that runs; None between steps.
        step_losses: by microbatch, of the last step.
        step_outputs: by microbatch, of the last step.
    """

    def __init__(self, stages: Sequence[Stage], microbatches: int, *, split: bool, divisor: int) -> None:
        self.data: StepData | None = None
        self.step_losses: dict[int, Tensor] = {}
        self.step_outputs: dict[int, Any] = {}
        self._stages = {stage.stage_index: stage for stage in stages}
        self._microbatches = microbatches
        self._split = split
        self._divisor = divisor

    def open(self, step: StepId, batch: Batch) -> None:
        """See `rrfp.StageProgram.open`."""
        # With backward_requires_autograd=False a training step may run under no_grad, all of it.
        self._has_grad_mode = torch.is_grad_enabled()
        self._modes = CallerModes.capture(step.mode if self._has_grad_mode else Mode.FORWARD)
        self.step_losses.clear()
        self.step_outputs.clear()
        self._received: dict[tuple[int, int], tuple[Tensor | None, ...]] = {}
        self._memory: dict[tuple[int, int], frozenset[int]] = {}
        self._adopted: dict[int, AdoptedGradients] = {}
        #: Of stages with a dw_builder, the microbatches whose B has run and whose W has not, in the order of their Bs.
        self._before_weight: dict[int, deque[int]] = {v: deque() for v in self._stages}
        #: The stages to reduce, deepest first, and those whose gradients are formed.
        self._to_reduce = deque(sorted(self._stages, reverse=True))
        self._formed: set[int] = set()

    def forward(self, task: Task, inputs: tuple[Payload, ...]) -> Payload:
        """See `rrfp.StageProgram.forward`.

        Raises:
            StageError: if the module wrote into a received tensor, or its output cannot be sent.
        """
        return self._modes.forward(self._forward, task, inputs)

    def backward(self, task: Task, grads: tuple[Payload, ...]) -> tuple[Payload, ...]:
        """See `rrfp.StageProgram.backward`."""
        return self._modes.backward(self._in_grad_mode, self._backward, task, grads)

    def weight(self, task: Task) -> None:
        """See `rrfp.StageProgram.weight`."""
        self._modes.backward(self._in_grad_mode, self._weight, task)

    def finish(self, virtual_stage: int) -> None:
        """See `rrfp.StageProgram.finish`. Reduces in the same order on all replicas, however stages finish."""
        # Replicas are pipelines of their own, and their stages share process groups. Deepest first ends: the rank
        # of a stage that waits for its replica has run every task of deeper stages.
        self._formed.add(virtual_stage)
        while self._to_reduce and self._to_reduce[0] in self._formed:
            self._modes.backward(self._in_grad_mode, self._reduce, self._stages[self._to_reduce.popleft()])

    def losses(self) -> Mapping[int, float]:
        """See `rrfp.StageProgram.losses`. None where one is no ordinary scalar, as a DTensor or an evaluation's."""
        if not all(private.is_plain_scalar(loss) for loss in self.step_losses.values()):
            return {}
        return {m: float(loss.detach()) for m, loss in self.step_losses.items()}

    # On the lane's thread, in the caller's modes.

    def _in_grad_mode(self, function: Callable[..., Any], *arguments: Any) -> Any:
        with torch.set_grad_enabled(self._has_grad_mode):
            return function(*arguments)

    def _forward(self, task: Task, inputs: tuple[Payload, ...]) -> Payload:
        _, m, v = task
        stage, data = self._stages[v], self._of_step
        with record_function(f"PP:{v}F{m}"):
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
            if stage.is_last:
                self._keep(m, output, data)
        outputs = () if stage.is_last else private.outputs_of(output)
        payload = Payload.pack(tuple(map(private.local_shard, outputs))).sent()
        if not stage.has_backward:  # torch would keep inputs and outputs of all microbatches
            stage.clear_runtime_states()
        return payload

    def _keep(self, microbatch: int, output: Any, data: StepData) -> None:
        if data.loss is not None:
            target = None if data.targets is None else data.targets[microbatch]
            self.step_losses[microbatch] = data.loss(output, target)
        if data.keeps_outputs:
            self.step_outputs[microbatch] = output

    def _backward(self, task: Task, grads: tuple[Payload, ...]) -> tuple[Payload, ...]:
        _, m, v = task
        stage = self._stages[v]
        if v not in self._adopted:  # not before the first forward, in which FSDP2 gathers the parameters
            self._adopted[v] = AdoptedGradients(stage.submod)
        with record_function(f"PP:{v}{'I' if self._split else 'B'}{m}"):
            if grads:
                private.put_gradients(stage, m, grads[0].tensors)
            loss = self.step_losses[m] if stage.is_last else None
            unwrapped(stage.backward_one_chunk, m, loss=loss, full_backward=not self._split, last_backward=False)
            gradients = private.take_gradients(stage, m)
        received = self._received.pop((m, v), ())
        sent = (Payload(tuple(map(_sent_gradient, gradients, received))).sent(),) if received else ()
        memory = self._adopted[v].memory_of((*grads, *sent))
        if self._split:
            if stage.dw_builder is not None:
                self._before_weight[v].append(m)
            self._memory[m, v] = memory
        else:
            self._adopted[v].copy_out_of(memory)
        return sent

    def _weight(self, task: Task) -> None:
        _, m, v = task
        stage = self._stages[v]
        if stage.dw_builder is not None:  # it may hand out its runners first in, first out
            m = self._before_weight[v].popleft()
        with record_function(f"PP:{v}W{m}"):
            unwrapped(stage.backward_weight_one_chunk, m, last_backward=False)
        self._adopted[v].copy_out_of(self._memory.pop((m, v)))

    def _reduce(self, stage: Stage) -> None:
        if private.is_ddp(stage.submod):
            private.reduce_ddp(stage)
        if self._of_step.finalizes or not private.is_fsdp(stage.submod):
            stage.perform_reduce_grad(self._divisor)

    @property
    def _of_step(self) -> StepData:
        assert self.data is not None, "a step runs"
        return self.data


def _sent_gradient(gradient: Tensor | None, received: Tensor | None) -> Tensor | None:
    """The gradient of a received tensor as it is sent: zeros where the loss does not depend on it."""
    if gradient is None:
        return None if received is None or not received.requires_grad else torch.zeros_like(received)
    return private.local_shard(gradient)


def _versions(tensors: Sequence[Tensor | None]) -> list[int | None]:
    return [None if tensor is None or tensor.is_inference() else tensor._version for tensor in tensors]


def _check_unwritten(stage: Stage, received: Sequence[Tensor | None], versions: Sequence[int | None]) -> None:
    """Refuse a module that wrote into a received tensor: its memory may have other readers."""
    for index, (before, after) in enumerate(zip(versions, _versions(received), strict=True)):
        if before != after:
            raise StageError(
                f"{type(stage.submod).__name__} on stage {stage.stage_index} wrote into its input {index}, which comes "
                "from another stage and is read-only; use an out-of-place operation, or clone it first (x = x.clone())"
            )
