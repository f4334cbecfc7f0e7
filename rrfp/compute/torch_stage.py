"""`TorchStage`: forward and backward of ordinary ``nn.Module`` s, one for each virtual stage of a rank.

Invariants: tasks of any microbatches may come in any order that the graph allows; whatever a forward keeps belongs to
one (microbatch, virtual stage) and is gone after its backward; every gradient is the one that autograd would form in
one process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from rrfp.compute.activations import ActivationMeter, describe, tensors_in
from rrfp.compute.async_tensors import landed, whole
from rrfp.compute.buffers import StateWatches
from rrfp.compute.caller_context import CallerModes
from rrfp.compute.calling import Arguments, check_batch, check_loss, check_placement, detached, requires_grad
from rrfp.compute.gradients.own_gradients import OwnGradients
from rrfp.compute.gradients.shared import SharedGradients
from rrfp.compute.loss_module import with_loss
from rrfp.compute.payload import Payload, canonical
from rrfp.compute.program import Batch, StageProgram
from rrfp.compute.received import ReadOnly, Received
from rrfp.compute.rng import RandomForks, devices_of
from rrfp.compute.split.backward import Root, SplitBackward, Unsplittable
from rrfp.compute.split.pending_weights import PendingWeights
from rrfp.core.graph import Graph
from rrfp.core.readiness import ForcedOrder
from rrfp.core.tasks import Kind, Mode, StepId, Task

LossFunction = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a forward leaves for its backward.

    Attributes:
        received: the input leaves, which collect the input gradients.
        roots: for each output tensor where backward enters the graph, None where it does not require grad. Edges and
            not tensors, so that an output is freed once it is sent, unless autograd itself saved it. Empty on the last.
        loss: the loss with its graph, on the last virtual stage; None for one that counts for nothing.
        idle: outputs of the last virtual stage whose loss counts for nothing, and whose backward runs all the same.
    """

    received: Received
    roots: tuple[GradientEdge | None, ...]
    loss: Tensor | None = None
    idle: tuple[Tensor, ...] = ()


class TorchStage(StageProgram):
    """Runs the modules of one rank.

    How a module is called: the first virtual stage gets ``inputs[m]``, every other one what its predecessor returned. A
    tuple is spread over positional arguments, a dict over keywords, anything else is one argument, a named tuple too;
    several predecessors are spread one after the other, in graph order. ``kwargs[m]`` is added on every virtual stage
    of the rank. A module returns a tensor, or a nesting that :class:`Payload` can carry. Received tensors must not be
    written to; that is checked.

    Gradients are added to ``.grad``, over microbatches and over steps; zeroing them is the caller's. Parameters may be
    frozen or unused. Modules are used in the train or eval mode that they are in: ``evaluate`` does not switch it.

    An output may share memory with an input or with a parameter, so whoever receives or sends a payload must keep its
    memory for as long as tensors on it live.

    Args:
        modules: by virtual stage; exactly those that one stage of ``graph`` holds.
        graph: who feeds whom.
        loss_fn: ``loss_fn(output, target)``, a scalar floating tensor: the mean over the microbatch. Needed on the last
            virtual stage in training. If it is a module, its parameters are treated as those of the last one's.
        seed: seed of the random forks, the same on all ranks. None: draw from torch's generators as they are.
        unsplittable: what to do with a split virtual stage whose module differentiates only as a whole: ``"whole"``
            runs its backward in B and nothing in W, ``"refuse"`` raises a StageError that names it.
        in_order: (kind, virtual stage) pairs that run in microbatch order. Where any order is kept, a task that writes
            state which depends on another order (`StateWatches`), and a whole backward in an unordered B, raise a
            StageError.
        shared: keeps gradients of parameters apart that several virtual stages of the process share.
        grouped: ranks with data of their own join in collectives inside tasks, so every backward runs. A loss whose
            factor is 0 is never differentiated; there, backward enters at the outputs, with zeros.

    Raises:
        ConfigError: if ``modules`` is not what one stage holds.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        graph: Graph,
        *,
        loss_fn: LossFunction | None = None,
        seed: int | None = 0,
        unsplittable: Unsplittable = "whole",
        in_order: Collection[ForcedOrder] = (),
        shared: SharedGradients | None = None,
        grouped: bool = False,
    ) -> None:
        check_placement(modules, graph)
        self._modules = dict(modules)
        #: What has the parameters, buffers and submodules of each virtual stage.
        self._units = with_loss(modules, graph, loss_fn)
        self._shared = SharedGradients({}) if shared is None else shared
        self._graph = graph
        self._loss_fn = loss_fn
        self._seed = seed
        self._grouped = grouped
        self._meters = {v: ActivationMeter(unit) for v, unit in self._units.items()}
        keeps = frozenset(in_order)
        # Where gradients are added in order, a whole backward in B would add them out of it.
        whole = "refuse" if any(kind is Kind.W for kind, _ in keeps) else unsplittable
        self._split = {v: SplitBackward(unit, v, whole) for v, unit in self._units.items() if graph.split[v]}
        self._state = StateWatches(self._units, keeps)
        self._is_first = any(not graph.predecessors[v] for v in self._modules)
        self._is_last = any(not graph.successors[v] for v in self._modules)
        self._step: StepId | None = None
        self._clear()

    def open(self, step: StepId, batch: Batch) -> None:
        """Begin a step, in the modes of the calling thread. See :meth:`StageProgram.open`.

        Raises:
            ConfigError: if the batch lacks what this rank needs, a list has not M entries, a training step has no
                ``loss_fn`` or is called under ``no_grad``.
        """
        check_batch(batch, step, first=self._is_first, last=self._is_last, has_loss=self._loss_fn is not None)
        self._modes = CallerModes.capture(step.mode)
        self._forks = RandomForks(self._seed, frozenset().union(*map(devices_of, self._units.values())))
        self._step, self._batch = step, batch
        self._clear()
        for v, unit in self._units.items():
            with self._shared.lent(v):
                self._own[v] = OwnGradients(unit)
        self._state.open(step)

    def forward(self, task: Task, inputs: tuple[Payload, ...]) -> Payload:
        """See :meth:`StageProgram.forward`.

        Raises:
            StageError: if the module wrote into a received tensor, returned what cannot travel, or the loss is no
                scalar.
        """
        assert self._step is not None
        with self._forks.fork(self._batch.training_step, task), self._state.over(task):
            return self._modes.forward(self._forward, task, inputs)

    def backward(self, task: Task, grads: tuple[Payload, ...]) -> tuple[Payload, ...]:
        """See :meth:`StageProgram.backward`. Does nothing where nothing requires grad.

        Raises:
            StageError: if a received tensor was written to since the forward, or a received gradient now.
        """
        assert self._step is not None
        _, m, v = task
        kept = self._kept.pop((m, v))
        module = self._modules[v]
        kept.received.check(module, v, "after its forward")
        watch = ReadOnly(grads, [f"of the output gradients from virtual stage {w}" for w in self._graph.successors[v]])
        with self._shared.lent(v):
            with self._forks.fork(self._batch.training_step, task), self._state.over(task):
                pending = self._modes.backward(self._differentiate, kept, task, grads)
            foreign = self._own[v].foreign(grads)
            if pending is None:
                self._own[v].settle(foreign)
        watch.check(module, v, "in its backward")
        if pending is None:
            self._held.pop((m, v), None)
        else:
            self._pending[m, v] = (pending, foreign)
            self._held[m, v] = pending.num_bytes
        return kept.received.gradients()

    def weight(self, task: Task) -> None:
        """See :meth:`StageProgram.weight`."""
        _, m, v = task
        pending, foreign = self._pending.pop((m, v))
        with self._shared.lent(v), self._state.over(task):
            self._modes.backward(pending.add_to_gradients)
            self._own[v].settle(foreign)
        self._held.pop((m, v), None)

    def held_bytes(self, microbatch: int, virtual_stage: int) -> int:
        """Bytes of received inputs and of what autograd saved, storages counted once, parameters and buffers never.

        Measured on the first microbatch of each input signature; see :class:`ActivationMeter`. Between a split
        virtual stage's B and W: bytes of what W needs.
        """
        return self._held.get((microbatch, virtual_stage), 0)

    def held_output_bytes(self, microbatch: int, virtual_stage: int) -> int:
        """See :meth:`StageProgram.held_output_bytes`; measured like `held_bytes`."""
        return self._held_outputs.get((microbatch, virtual_stage), 0)

    def losses(self) -> Mapping[int, float]:
        """See :meth:`StageProgram.losses`. Waits for the device, so not to be called between tasks."""
        return {m: float(self._losses[m]) for m in sorted(self._losses)}

    def outputs(self) -> Mapping[int, Any]:
        """See :meth:`StageProgram.outputs`: by default kept in a forward-only step without targets or ``loss_fn``."""
        return {m: self._outputs[m] for m in sorted(self._outputs)}

    def _clear(self) -> None:
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._held: dict[tuple[int, int], int] = {}
        self._held_outputs: dict[tuple[int, int], int] = {}
        self._losses: dict[int, Tensor] = {}
        self._outputs: dict[int, Any] = {}
        #: What B left for W, and the received memory that no gradient may keep, by microbatch and virtual stage.
        self._pending: dict[tuple[int, int], tuple[PendingWeights, frozenset[int]]] = {}
        self._own: dict[int, OwnGradients] = {}

    def _forward(self, task: Task, inputs: tuple[Payload, ...]) -> Payload:
        _, m, v = task
        module, training = self._modules[v], self._modes.mode is Mode.TRAIN
        received = Received(inputs, self._graph.predecessors[v], training=training)
        arguments = self._arguments(m, v, received)

        def call() -> tuple[Any, Tensor | None]:
            output = module(*arguments.args, **arguments.kwargs)
            return output, self._loss(output, task)

        try:
            if training:
                signature = self._signature(m, v, arguments)
                (output, loss), kept = self._meters[v].run(call, signature, received.tensors())
                self._held[m, v], self._held_outputs[m, v] = kept.held, kept.of_output
            else:
                output, loss = call()
        except RuntimeError as error:
            if (explained := received.explain(error, module, v)) is not None:
                raise explained from error
            raise
        received.check(module, v, "in its forward")
        return self._keep(task, received, output, loss)

    def _keep(self, task: Task, received: Received, output: Any, loss: Tensor | None) -> Payload:
        _, m, v = task
        batch, training = self._batch, self._modes.mode is Mode.TRAIN
        if not self._graph.successors[v]:
            if not training and (loss is None if batch.return_outputs is None else batch.return_outputs):
                self._outputs[m] = detached(output)
                for tensor in tensors_in(self._outputs[m]):
                    landed(tensor)
            if loss is not None:
                self._losses[m] = landed(loss.detach())
            if training and self._batch.gradient_weights[m]:
                self._kept[m, v] = _Kept(received, (), loss)
            elif training:
                idle = tuple(t for t in tensors_in(output) if t.requires_grad) if self._grouped else ()
                self._kept[m, v] = _Kept(received, (), None, idle)
            return Payload()
        packed = Payload.pack(output)
        if training:
            roots = tuple(get_gradient_edge(t) if t is not None and t.requires_grad else None for t in packed.tensors)
            self._kept[m, v] = _Kept(received, roots)
        return Payload(tuple(map(_detached, packed.tensors)), packed.structure)

    def _differentiate(self, kept: _Kept, task: Task, grads: tuple[Payload, ...]) -> PendingWeights | None:
        """Run B; returns what is left for W, None where the virtual stage is not split."""
        _, m, v = task
        roots: list[Root] = [*kept.idle]
        gradients = [torch.zeros_like(output) for output in kept.idle]
        if kept.loss is not None and kept.loss.requires_grad:
            roots, gradients = [kept.loss], [torch.full_like(kept.loss, self._batch.gradient_weights[m])]
        elif kept.loss is None:
            for payload in grads:
                for root, gradient in zip(kept.roots, payload.tensors, strict=True):
                    if root is not None and gradient is not None:
                        roots.append(root)
                        gradients.append(gradient)
        if v in self._split:
            return self._split[v].run(roots, gradients, kept.received)
        if roots:  # a root named twice gets the sum of its gradients
            torch.autograd.backward(roots, gradients)  # type: ignore[arg-type]
        return None

    def _loss(self, output: Any, task: Task) -> Tensor | None:
        _, m, v = task
        if self._graph.successors[v] or self._loss_fn is None or self._batch.targets is None:
            return None
        loss = self._loss_fn(output, self._batch.targets[m])
        if isinstance(loss, Tensor):
            loss = whole(loss)
        learns = requires_grad(output) or any(parameter.requires_grad for parameter in self._units[v].parameters())
        return check_loss(loss, m, differentiable=self._modes.mode is Mode.TRAIN and learns)

    def _arguments(self, m: int, v: int, received: Received) -> Arguments:
        batch = self._batch
        if self._graph.predecessors[v]:
            values = received.values(hidden=v in self._split)
        else:
            assert batch.inputs is not None
            values = [batch.inputs[m]]
        return Arguments.spread(values if batch.kwargs is None else [*values, batch.kwargs[m]])

    def _signature(self, m: int, v: int, arguments: Arguments) -> Hashable:
        target = None if self._batch.targets is None or self._graph.successors[v] else self._batch.targets[m]
        module = self._modules[v]
        return describe((arguments.args, arguments.kwargs, target)), module.training, self._modes.autocast


def _detached(tensor: Tensor | None) -> Tensor | None:
    """What is sent: the same memory without a history, and whether a gradient is wanted back."""
    return None if tensor is None else canonical(tensor.detach()).requires_grad_(tensor.requires_grad)
