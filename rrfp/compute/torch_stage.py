"""`TorchStage`: forward and backward of ordinary ``nn.Module`` s, one for each virtual stage of a rank.

Invariants: tasks of any microbatches may run in any order that the graph allows; the state that a forward saves belongs
to one (microbatch, virtual stage) and is freed by its backward; every gradient is the one that autograd would form in
one process.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rrfp.compute import engine
from rrfp.compute.activations import ActivationMeter, describe, tensors_in
from rrfp.compute.async_tensors import full_tensor
from rrfp.compute.buffers import StateWatches
from rrfp.compute.caller_context import CallerModes
from rrfp.compute.calling import check_batch, check_loss, check_placement, requires_grad
from rrfp.compute.gradients.adopted import AdoptedGradients
from rrfp.compute.gradients.shared import SharedGradients
from rrfp.compute.loss_module import LossFunction, losses_by_stage, with_loss
from rrfp.compute.payload import Payload
from rrfp.compute.program import Batch, StageProgram
from rrfp.compute.received import ReadOnly, Received
from rrfp.compute.rng import RandomForks, devices_of
from rrfp.compute.saved_forward import SavedForward
from rrfp.compute.split.backward import SplitBackward, Unsplittable
from rrfp.compute.split.pending_weights import PendingWeights
from rrfp.compute.stage_inputs import StageInputs
from rrfp.compute.step_results import StepResults
from rrfp.core.graph import Graph
from rrfp.core.readiness import ForcedOrder
from rrfp.core.tasks import Kind, Mode, StepId, Task
from rrfp.graphs.feeds import Feeds


class TorchStage(StageProgram):
    """Runs the modules of one rank.

    The first virtual stage is called with ``inputs[m]``, every other one with the outputs of its predecessors. A tuple
    becomes positional arguments, a dict keyword arguments, and any other value, also a named tuple, one argument; the
    outputs of several predecessors follow one another in graph order. ``kwargs[m]`` is added on every virtual stage of
    the rank. A module returns a tensor, or a nesting that :class:`Payload` can carry. A module must not write to
    received tensors; this is checked.

    Gradients are added to ``.grad``, over microbatches and over steps; the caller zeroes them. Parameters may be frozen
    or unused. Modules run in their current train or eval mode: ``evaluate`` does not switch it.

    An output may share memory with an input or a parameter, so a sender or receiver of a payload must keep its memory
    alive as long as tensors on it.

    Args:
        modules: by virtual stage; exactly those that one stage of ``graph`` holds.
        graph: the virtual stages and their edges.
        loss_fn: ``loss_fn(output, target)``, a scalar floating tensor: the mean over the microbatch. Needed on the last
            virtual stage in training. If it is a module, its parameters are treated as parameters of that stage. Where
            several parts have losses, one for the last virtual stage of each.
        seed: seed of the random forks, the same on all ranks. None: draw from torch's generators without forking.
        unsplittable: how to run a split virtual stage whose module differentiates only as a whole: ``"whole"`` runs the
            whole backward in B and nothing in W, ``"refuse"`` raises a StageError that names the module.
        in_order: (kind, virtual stage) pairs that run in microbatch order. If there are any, a task that writes state
            outside such an order (`StateWatches`), and a whole backward in an unordered B, raise a StageError.
        devices: CUDA devices whose random generators tasks use, beside those that hold parameters or buffers.
        shared: separates the gradients of parameters that several virtual stages of the process share.
        grouped: whether ranks with other data join in collectives inside tasks, so that every backward has to run. A
            loss of weight 0 is never differentiated; its backward then enters at the outputs, with zeros.
        feeds: what each virtual stage is called with, where the model has parts; see `rrfp.Graph`.

    Raises:
        ConfigError: if ``modules`` are not those of one stage.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        graph: Graph,
        *,
        loss_fn: LossFunction | Mapping[int, LossFunction] | None = None,
        seed: int | None = 0,
        unsplittable: Unsplittable = "whole",
        in_order: Collection[ForcedOrder] = (),
        devices: Collection[torch.device] = (),
        shared: SharedGradients | None = None,
        grouped: bool = False,
        feeds: Feeds | None = None,
    ) -> None:
        check_placement(modules, graph)
        self._modules = dict(modules)
        #: By virtual stage, a module with all its parameters, buffers and submodules, those of the loss included.
        self._losses = losses_by_stage(loss_fn, graph)
        self._units = with_loss(modules, self._losses)
        self._shared = SharedGradients({}) if shared is None else shared
        self._graph = graph
        self._seed = seed
        self._devices = frozenset(devices)
        self._grouped = grouped
        self._meters = {v: ActivationMeter(unit) for v, unit in self._units.items()}
        forced = frozenset(in_order)
        # Ws that run in order fix the order of additions to `.grad`; a whole backward in B would add out of that order.
        unsplittable = "refuse" if any(kind is Kind.W for kind, _ in forced) else unsplittable
        self._split = {v: SplitBackward(unit, v, unsplittable) for v, unit in self._units.items() if graph.split[v]}
        self._state = StateWatches(self._units, forced)
        self._feeds = Feeds() if feeds is None else feeds
        #: Whose inputs are the caller's alone: the first virtual stage, or parts by name.
        sources = [v for v in self._modules if not graph.predecessors[v]]
        self._sources = [self._feeds.parts[v] if self._feeds.parts else None for v in sources]
        #: The last virtual stages, each with the part that it has a loss of its own for; "" where there is one loss.
        self._ends = {v: self._feeds.loss_of(v) for v in self._modules if not graph.successors[v]}
        self._step: StepId | None = None
        self._clear()

    def open(self, step: StepId, batch: Batch) -> None:
        """Begin a step, in the modes of the calling thread. See :meth:`StageProgram.open`.

        Raises:
            ConfigError: if the batch lacks data that this rank needs, a list has not M entries, or a training step has
                no ``loss_fn`` or is called under ``no_grad``.
        """
        ends = {part: v in self._losses for v, part in self._ends.items()}
        check_batch(batch, step, sources=self._sources, ends=ends)
        modes = CallerModes.capture(step.mode)
        # On a device's lane that device is current, whichever is in the caller's thread.
        self._modes = replace(modes, cuda_device=None) if self._devices else modes
        self._forks = RandomForks(self._seed, self._devices.union(*map(devices_of, self._units.values())))
        self._step, self._batch, self._inputs = step, batch, StageInputs(batch, self._graph, self._feeds)
        self._clear()
        for v, unit in self._units.items():
            with self._shared.swapped_in(v):
                self._adopted[v] = AdoptedGradients(unit)
        self._state.open(step)

    def forward(self, task: Task, inputs: tuple[Payload, ...]) -> Payload:
        """See :meth:`StageProgram.forward`.

        Raises:
            StageError: if the module wrote into a received tensor or returned a value that a payload cannot carry, or
                if the loss is no scalar.
        """
        assert self._step is not None
        step = self._batch.training_step
        with self._state.watching(task):
            return self._forks.run(step, task, self._modes.forward, self._forward, task, inputs)

    def backward(self, task: Task, grads: tuple[Payload, ...]) -> tuple[Payload, ...]:
        """See :meth:`StageProgram.backward`. Does nothing if nothing requires grad.

        Raises:
            StageError: if a received tensor was written to since the forward, or a received gradient now.
        """
        assert self._step is not None
        _, m, v = task
        saved = self._saved.pop((m, v))
        module = self._modules[v]
        saved.received.check(module, v, "after its forward")
        watch = ReadOnly(grads, "of the output gradients", self._graph.successors[v])
        with self._shared.swapped_in(v):
            with self._state.watching(task):
                step = self._batch.training_step
                pending = self._forks.run(step, task, self._modes.backward, self._differentiate, saved, v, grads)
            input_grads = saved.received.gradients()
            memory = self._adopted[v].memory_of((*grads, *input_grads))
            if pending is None:
                self._adopted[v].copy_out_of(memory)
        watch.check(module, v, "in its backward")
        if pending is None:
            self._held.pop((m, v), None)
        else:
            self._pending[m, v] = (pending, memory)
            self._held[m, v] = pending.num_bytes
        return input_grads

    def weight(self, task: Task) -> None:
        """See :meth:`StageProgram.weight`. Does nothing if B ran the whole backward."""
        _, m, v = task
        if (left := self._pending.pop((m, v), None)) is None:
            return
        pending, memory = left
        with self._shared.swapped_in(v), self._state.watching(task):
            self._modes.backward(pending.add_to_gradients)
            self._adopted[v].copy_out_of(memory)
        self._held.pop((m, v), None)

    def held_bytes(self, microbatch: int, virtual_stage: int) -> int:
        """Bytes of received inputs and of tensors that autograd saved; parameters and buffers do not count.

        Measured on the first microbatch of each input signature; see :class:`ActivationMeter`. Between B and W of a
        split virtual stage: bytes of the tensors that W needs.
        """
        return self._held.get((microbatch, virtual_stage), 0)

    def signature(self, task: Task, inputs: tuple[Payload, ...]) -> Hashable:
        """See :meth:`StageProgram.signature`: all that `ActivationMeter` measures a forward for."""
        _, m, v = task
        received = tuple((payload.tensors, payload.structure) for payload in inputs)
        return self._signature(m, v, (received, *self._inputs.of_caller(m, v)))

    def input_bytes(self, task: Task, inputs: tuple[Payload, ...]) -> int | None:
        """See :meth:`StageProgram.input_bytes`: of received tensors and of the caller's, as dense ones."""
        _, m, v = task
        return self._inputs.num_bytes(m, v, inputs) or None

    def held_output_bytes(self, microbatch: int, virtual_stage: int) -> int:
        """See :meth:`StageProgram.held_output_bytes`; measured like `held_bytes`."""
        return self._held_outputs.get((microbatch, virtual_stage), 0)

    def losses(self) -> Mapping[int, float]:
        """See :meth:`StageProgram.losses`. Waits for the device, so it must not be called between tasks."""
        return self._results.losses()

    def losses_by_part(self) -> Mapping[str, Mapping[int, float]]:
        """See :meth:`StageProgram.losses_by_part`. Waits like `losses`."""
        return self._results.losses_by_part()

    def outputs(self) -> Mapping[int, Any]:
        """See :meth:`StageProgram.outputs`; by default kept in a forward-only step without targets or ``loss_fn``."""
        return self._results.outputs()

    def _clear(self) -> None:
        #: By microbatch and virtual stage, as are the bytes and the pending weights.
        self._saved: dict[tuple[int, int], SavedForward] = {}
        self._held: dict[tuple[int, int], int] = {}
        self._held_outputs: dict[tuple[int, int], int] = {}
        self._results = StepResults(self._ends.values())
        #: The work that B left to W, and the addresses of payloads in which no `.grad` may lie.
        self._pending: dict[tuple[int, int], tuple[PendingWeights, frozenset[int]]] = {}
        self._adopted: dict[int, AdoptedGradients] = {}

    def _forward(self, task: Task, inputs: tuple[Payload, ...]) -> Payload:
        _, m, v = task
        module, training = self._modules[v], self._modes.mode is Mode.TRAIN
        received = Received(inputs, self._graph.predecessors[v], training=training)
        values = received.values(hidden=v in self._split) if self._graph.predecessors[v] else ()
        arguments = self._inputs.arguments(m, v, values)

        def call() -> tuple[Any, Tensor | None]:
            output = module(*arguments.args, **arguments.kwargs)
            return output, self._loss(output, task)

        try:
            if training:
                signature = self._signature(m, v, (arguments.args, arguments.kwargs))
                (output, loss), kept = self._meters[v].run(call, signature, received.tensors())
                self._held[m, v], self._held_outputs[m, v] = kept.held, kept.of_output
            else:
                output, loss = call()
        except RuntimeError as error:
            if (explained := received.explain(error, module, v)) is not None:
                raise explained from error
            raise
        received.check(module, v, "in its forward")
        return self._save(task, received, output, loss)

    def _save(self, task: Task, received: Received, output: Any, loss: Tensor | None) -> Payload:
        """Save the state for the backward; returns the payload for the successors."""
        _, m, v = task
        training = self._modes.mode is Mode.TRAIN
        if not self._graph.successors[v]:
            self._results.keep(m, output, loss, self._batch, self._modes.mode, self._ends[v])
            if training:
                self._saved[m, v] = self._saved_loss(m, received, output, loss)
            return Payload()
        packed = Payload.pack(output)
        if training:
            read = [self._feeds.keys(v, (w,)) for w in self._graph.successors[v]]
            self._saved[m, v] = SavedForward.of_outputs(received, packed, read)
        return packed.sent()

    def _saved_loss(self, m: int, received: Received, output: Any, loss: Tensor | None) -> SavedForward:
        if factor := self._batch.gradient_weights[m]:
            return SavedForward(received, loss=loss, loss_weight=factor)
        # Why not differentiate with the factor 0? The loss of an empty microbatch may be nan, and 0 * nan is nan. The
        # backward may have to run all the same, for the other ranks of its collectives.
        outputs = tuple(t for t in tensors_in(output) if t.requires_grad) if self._grouped else ()
        return SavedForward(received, unweighted=outputs)

    def _differentiate(self, saved: SavedForward, v: int, grads: tuple[Payload, ...]) -> PendingWeights | None:
        """Run B; returns the work left to W, None if the whole backward ran."""
        roots, gradients = saved.roots(grads)
        if v in self._split:
            return self._split[v].run(roots, gradients, saved.received)
        if roots:  # autograd adds the gradients of a root that occurs twice
            engine.backward(roots, gradients)
        return None

    def _loss(self, output: Any, task: Task) -> Tensor | None:
        _, m, v = task
        if (loss_fn := self._losses.get(v)) is None or (targets := self._inputs.targets(v)) is None:
            return None
        loss = loss_fn(output, targets[m])
        if isinstance(loss, Tensor):
            loss = full_tensor(loss)
        learns = requires_grad(output) or any(parameter.requires_grad for parameter in self._units[v].parameters())
        return check_loss(loss, m, differentiable=self._modes.mode is Mode.TRAIN and learns)

    def _signature(self, m: int, v: int, arguments: Any) -> Hashable:
        target = None if (targets := self._inputs.targets(v)) is None else targets[m]
        return describe(arguments), describe(target), self._modules[v].training, self._modes.autocast
