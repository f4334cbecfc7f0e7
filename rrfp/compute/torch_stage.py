"""`TorchStage`: forward and backward of ordinary ``nn.Module`` s, one for each virtual stage of a rank.

Invariants: tasks of any microbatches may run in any order that the graph allows; the state that a forward saves belongs
to one (microbatch, virtual stage) and is freed by its backward; every gradient is the one that autograd would form in
one process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from rrfp.compute.activations import ActivationMeter, describe, tensors_in
from rrfp.compute.async_tensors import full_tensor, wait_async
from rrfp.compute.buffers import BufferMemory, CarriedState, StateWatches
from rrfp.compute.caller_context import CallerModes
from rrfp.compute.calling import Arguments, check_batch, check_loss, check_placement, detached, requires_grad
from rrfp.compute.gradients.adopted import AdoptedGradients
from rrfp.compute.gradients.shared import SharedGradients
from rrfp.compute.loss import LossFunction, class_name, losses_by_stage, warn_of_foreign_parameters, with_loss
from rrfp.compute.payload import ABSENT, Payload
from rrfp.compute.program import Batch, StageProgram
from rrfp.compute.read_only import ReadOnly, Received, write_counter
from rrfp.compute.rng import RandomForks, SeedNotice, devices_of
from rrfp.compute.split.autograd_graph import Root, run_backward
from rrfp.compute.split.backward import SplitBackward, Unsplittable
from rrfp.compute.split.pending_weights import PendingWeights
from rrfp.core.ready_set import ForcedOrder
from rrfp.errors import StageError
from rrfp.model.graph import TaskGraph
from rrfp.model.model_graph import Feeds
from rrfp.model.tasks import Kind, Mode, StepId, Task


class _Output(NamedTuple):
    """A sent tensor, without its memory."""

    edge: GradientEdge
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def gradient(self, received: Tensor) -> Tensor:
        """The received gradient, where autograd wants it."""
        if received.shape != self.shape or received.is_complex() != self.dtype.is_complex:
            raise StageError(
                f"a gradient of shape {tuple(received.shape)} and {received.dtype} arrived for an output of shape "
                f"{tuple(self.shape)} and {self.dtype}"
            )
        return received if received.device == self.device else received.to(self.device)


@dataclass(frozen=True, slots=True)
class SavedForward:
    """One microbatch on one virtual stage, between F and B."""

    #: The input leaves, which collect the input gradients.
    received: Received
    #: The sent tensors, None for one that does not require grad. Empty on the last virtual stage.
    outputs: tuple[_Output | None, ...] = ()
    #: The loss with its graph, on the last virtual stage; None if its weight is 0.
    loss: Tensor | None = None
    loss_weight: float = 0.0
    #: Outputs of the last virtual stage whose loss has weight 0 and whose backward runs all the same.
    unweighted: tuple[Tensor, ...] = ()
    #: By successor, the indices of the sent tensors that it reads; None: all of them.
    picked: tuple[tuple[int, ...] | None, ...] = ()

    @classmethod
    def of_outputs(cls, received: Received, output: Payload, read: Sequence[tuple[str, ...] | None]) -> SavedForward:
        """For a virtual stage whose successors ``read`` these keys."""
        # Why not keep the tensors? An edge refers to the graph alone, so an output is freed once it is sent, unless
        # autograd itself saved it.
        saved = [
            _Output(get_gradient_edge(t), t.shape, t.dtype, t.device) if t is not None and t.requires_grad else None
            for t in output.tensors
        ]
        picked = tuple([None if keys is None else output.pick(keys)[1] for keys in read])
        return cls(received, tuple(saved), picked=picked)

    def roots(self, grads: Sequence[Payload]) -> tuple[list[Root], list[Tensor]]:
        """Where backward enters the graph, and the gradient for each entry; a root may occur several times."""
        # Several gradients of one output are those of the later readers first. Autograd adds them in this order, as it
        # does where one process calls the readers in the order of virtual stages.
        if self.loss is not None:
            if not self.loss.requires_grad:
                return [], []
            return [self.loss], [torch.full_like(self.loss, self.loss_weight)]
        roots: list[Root] = [*self.unweighted]
        gradients = [torch.zeros_like(output) for output in self.unweighted]
        for payload, indices in zip(reversed(grads), reversed(self.picked), strict=True):
            if payload is ABSENT:
                continue
            sent = self.outputs if indices is None else [self.outputs[i] for i in indices]
            if len(payload.tensors) != len(sent):
                raise StageError(
                    f"{len(payload.tensors)} gradients arrived, must be one for each tensor sent: {len(sent)}"
                )
            for output, gradient in zip(sent, payload.tensors, strict=True):
                if output is not None and gradient is not None:
                    roots.append(output.edge)
                    gradients.append(output.gradient(gradient))
        return roots, gradients


class StageInputs:
    """The batch of a step, by microbatch and virtual stage."""

    def __init__(self, batch: Batch, graph: TaskGraph, feeds: Feeds) -> None:
        self._batch = batch
        self._graph = graph
        self._feeds = feeds

    def of_caller(self, m: int, v: int) -> tuple[Any, ...]:
        """The caller's input and its keyword arguments; each is missing where there is none."""
        batch, graph, parts = self._batch, self._graph, self._feeds.parts
        inputs: Any = batch.inputs
        kwargs: Any = batch.kwargs
        if parts:
            inputs = inputs.get(parts[v]) if isinstance(inputs, Mapping) and v in self._feeds.heads else None
            kwargs = kwargs.get(parts[v]) if isinstance(kwargs, Mapping) else kwargs
        elif graph.predecessors[v]:
            inputs = None
        return tuple([own[m] for own in (inputs, kwargs) if own is not None])

    def arguments(self, m: int, v: int, received: Sequence[Any]) -> Arguments:
        """Those of the module's call; ``received`` came from the predecessors of ``v``."""
        own = self.of_caller(m, v)
        if not (feeds := self._feeds.by_stage):
            return Arguments.spread([*received, *own])
        values = dict(zip(self._graph.predecessors[v], received, strict=True))
        spread: list[Any] = []
        named: dict[str, Any] = {}
        for source, argument, key in feeds[v]:
            value = values[source]
            if argument is None:
                spread.append(value)
            else:
                named[argument] = value if key is None or value is None else value[key]
        return Arguments.spread([*spread, *own, named])

    def targets(self, v: int) -> Sequence[Any] | None:
        targets = self._batch.targets
        if targets is None or self._graph.successors[v]:
            return None
        return targets.get(self._feeds.parts[v]) if isinstance(targets, Mapping) else targets

    def num_bytes(self, m: int, v: int, received: Sequence[Payload]) -> int:
        """Of received tensors and of the caller's, as dense ones."""
        own = sum(each.numel() * each.element_size() for each in tensors_in(self.of_caller(m, v)))
        return own + sum(each.num_bytes for each in received)


class StepResults:
    """Losses and outputs by part and microbatch, without history."""

    # ``makers`` names, for messages, those parts whose last modules lie on this rank and nothing reads; "" of a model
    # with one loss.

    def __init__(self, makers: Mapping[str, str], needs_copy: Mapping[str, Callable[[Tensor], bool]]) -> None:
        self._makers = makers
        self._needs_copy = needs_copy
        self._losses: dict[str, dict[int, Tensor]] = {part: {} for part in makers}
        self._outputs: dict[str, dict[int, Any]] = {part: {} for part in makers}
        #: By what it is, the counter of each kept tensor, and its count then.
        self._versions: list[tuple[str, Tensor, int]] = []

    def keep(self, microbatch: int, output: Any, loss: Tensor | None, batch: Batch, mode: Mode, part: str = "") -> None:
        """Keep the loss, and in an evaluation the output if it is wanted."""
        returns = batch.return_outputs
        if mode is not Mode.TRAIN and (loss is None if returns is None else returns):
            self._outputs[part][microbatch] = kept = detached(output, self._needs_copy[part])
            for tensor in tensors_in(kept):
                self._watch(f"output of microbatch {microbatch}", wait_async(tensor), part)
        if loss is not None:  # it is not read, since that would wait for the device
            self._losses[part][microbatch] = kept = wait_async(detached(loss, self._needs_copy[part]))
            self._watch(f"loss of microbatch {microbatch}", kept, part)

    def _watch(self, what: str, kept: Tensor, part: str) -> None:
        if (counter := write_counter(kept)) is not None:
            self._versions.append((f"{self._makers[part]} wrote into the {what}", counter, counter._version))

    def _check_unwritten(self) -> None:
        for writer, counter, version in self._versions:
            if counter._version != version:
                raise StageError(f"{writer} after it had returned it: return a clone (x.clone())")

    def losses(self) -> dict[int, float]:
        """The losses kept, added over the parts; otherwise as `losses_by_part`."""
        total: dict[int, float] = {}
        for own in self.losses_by_part().values():
            for m, loss in own.items():
                total[m] = total[m] + loss if m in total else loss
        return dict(sorted(total.items()))

    def losses_by_part(self) -> dict[str, dict[int, float]]:
        """The losses kept; waits for the device."""
        self._check_unwritten()
        return {part: {m: float(losses[m]) for m in sorted(losses)} for part, losses in self._losses.items()}

    def outputs(self) -> dict[int, Any]:
        """The outputs kept; a dict by part where losses are by part."""
        if "" in self._outputs:
            return dict(sorted(self._outputs[""].items()))
        microbatches = sorted({m for own in self._outputs.values() for m in own})
        return {m: {part: own[m] for part, own in self._outputs.items() if m in own} for m in microbatches}


@dataclass(frozen=True)
class StageEnvironment:
    """The rank and the process of a stage."""

    #: CUDA devices whose random generators tasks use, beside those that hold parameters or buffers.
    devices: Collection[torch.device] = ()
    #: Separates the gradients of parameters that several virtual stages of the process share.
    shared: SharedGradients = field(default_factory=lambda: SharedGradients({}))
    #: Ranks with other data join in collectives inside tasks, so every backward has to run. A loss of weight 0 is
    #: never differentiated; its backward then enters at the outputs, with zeros.
    grouped: bool = False
    #: Losses may have such collectives too, so one of weight 0 is differentiated with the factor 0.
    joined_losses: bool = False
    #: The arguments of each virtual stage, where the model has parts; see `rrfp.Graph`.
    feeds: Feeds = field(default_factory=Feeds)
    #: Warns where forwards out of microbatch order write buffers.
    carried: CarriedState = field(default_factory=CarriedState)
    #: Warns where tasks draw, and the caller has seeded torch and not the pipeline.
    seed_notice: SeedNotice | None = None


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

    ``loss_fn(output, target)`` is needed on the last virtual stage in training. If it is a module, its parameters are
    treated as parameters of that stage. If anything runs ``in_order`` of microbatches, a task that writes state outside
    such an order (`StateWatches`), and a whole backward in an unordered B, raise a StageError. A split virtual stage
    whose module differentiates only as a whole runs all in B and nothing in W, or is refused: ``unsplittable``.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        graph: TaskGraph,
        *,
        loss_fn: LossFunction | Mapping[int, LossFunction] | None = None,
        seed: int | None = 0,
        unsplittable: Unsplittable = "whole",
        in_order: Collection[ForcedOrder] = (),
        environment: StageEnvironment | None = None,
    ) -> None:
        environment = environment or StageEnvironment()
        check_placement(modules, graph)
        self._modules = dict(modules)
        #: By virtual stage, a module with all its parameters, buffers and submodules, those of the loss included.
        self._losses = losses_by_stage(loss_fn, graph)
        self._units = with_loss(modules, self._losses)
        #: Virtual stages whose loss is no module, and has not been differentiated yet.
        self._unseen_losses = {v for v, loss in self._losses.items() if not isinstance(loss, nn.Module)}
        self._shared = environment.shared
        self._graph = graph
        #: None: draw from torch's generators without forking.
        self._seed = seed
        self._devices = frozenset(environment.devices)
        self._grouped = environment.grouped
        self._joined_losses = environment.joined_losses
        self._meters = {v: ActivationMeter(unit) for v, unit in self._units.items()}
        forced = frozenset(in_order)
        # Ws that run in order fix the order of additions to `.grad`; a whole backward in B would add out of that order.
        unsplittable = "refuse" if any(kind is Kind.W for kind, _ in forced) else unsplittable
        self._split = {v: SplitBackward(unit, v, unsplittable) for v, unit in self._units.items() if graph.split[v]}
        self._state = StateWatches(self._units, forced)
        self._buffers = {v: BufferMemory(unit) for v, unit in self._units.items()}
        self._carried = None if forced else environment.carried
        self._seed_notice = environment.seed_notice
        self._feeds = environment.feeds
        #: Whose inputs are the caller's alone: the first virtual stage, or parts by name.
        sources = [v for v in self._modules if not graph.predecessors[v]]
        self._sources = [self._feeds.parts[v] if self._feeds.parts else None for v in sources]
        #: The last virtual stages, each with the part that it has a loss of its own for; "" where there is one loss.
        self._ends = {v: self._feeds.loss_of(v) for v in self._modules if not graph.successors[v]}
        self._step: StepId | None = None
        self._clear()

    def open(self, step: StepId, batch: Batch) -> None:
        """Begin a step, in the modes of the calling thread. See :meth:`StageProgram.open`."""
        ends = {part: v in self._losses for v, part in self._ends.items()}
        check_batch(batch, step, sources=self._sources, ends=ends)
        modes = CallerModes.capture(step.mode)
        # On a device's lane that device is current, whichever is in the caller's thread.
        self._modes = replace(modes, cuda_device=None) if self._devices else modes
        devices = self._devices.union(*map(devices_of, self._units.values()))
        on_draw = self._seed_notice.open() if self._seed_notice is not None and step.mode is Mode.TRAIN else None
        self._forks = RandomForks(self._seed, devices, on_draw=on_draw, homes=batch.homes)
        self._step, self._batch, self._inputs = step, batch, StageInputs(batch, self._graph, self._feeds)
        self._clear()
        for v, unit in self._units.items():
            with self._shared.swapped_in(v):
                self._adopted[v] = AdoptedGradients(unit)
            self._buffers[v].open()
        self._state.open(step)

    def reopen(self, step: StepId, batch: Batch) -> None:
        """See :meth:`StageProgram.reopen`. The modes stay those of the thread that called `open`."""
        self._step, self._batch, self._inputs = step, batch, StageInputs(batch, self._graph, self._feeds)
        self._forks = replace(self._forks, homes=batch.homes)
        self._state.open(step)

    def forward(self, task: Task, inputs: tuple[Payload, ...]) -> Payload:
        assert self._step is not None
        step = self._batch.training_step
        with self._watching(task):
            return self._forks.run(step, task, self._modes.forward, self._forward, task, inputs)

    def backward(self, task: Task, grads: tuple[Payload, ...]) -> tuple[Payload, ...]:
        """See :meth:`StageProgram.backward`. Does nothing if nothing requires grad."""
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

    def name_of(self, virtual_stage: int) -> str:
        return class_name(self._units[virtual_stage])

    def held_bytes(self, microbatch: int, virtual_stage: int) -> int:
        return self._held.get((microbatch, virtual_stage), 0)

    def signature(self, task: Task, inputs: tuple[Payload, ...]) -> Hashable:
        """See :meth:`StageProgram.signature`: all that `ActivationMeter` measures a forward for."""
        _, m, v = task
        received = tuple((payload.tensors, payload.structure) for payload in inputs)
        return self._signature(m, v, (received, *self._inputs.of_caller(m, v)))

    def input_bytes(self, task: Task, inputs: tuple[Payload, ...]) -> int | None:
        _, m, v = task
        return self._inputs.num_bytes(m, v, inputs) or None

    def held_output_bytes(self, microbatch: int, virtual_stage: int) -> int:
        return self._held_outputs.get((microbatch, virtual_stage), 0)

    def losses(self) -> Mapping[int, float]:
        """See :meth:`StageProgram.losses`. Waits for the device."""
        return self._results.losses()

    def losses_by_part(self) -> Mapping[str, Mapping[int, float]]:
        return self._results.losses_by_part()

    def outputs(self) -> Mapping[int, Any]:
        """See :meth:`StageProgram.outputs`; by default kept in a forward-only step without targets or ``loss_fn``."""
        return self._results.outputs()

    def _watching(self, task: Task) -> AbstractContextManager[None]:
        _, m, v = task
        if m > self._highest.get(v, -1):
            self._highest[v] = m
        elif self._carried is not None:
            return self._carried.watching(task, self._buffers[v])
        return self._state.watching(task)

    def _clear(self) -> None:
        #: By virtual stage, the highest microbatch whose forward has begun.
        self._highest: dict[int, int] = {}
        #: By microbatch and virtual stage, as are the bytes and the pending weights.
        self._saved: dict[tuple[int, int], SavedForward] = {}
        self._held: dict[tuple[int, int], int] = {}
        self._held_outputs: dict[tuple[int, int], int] = {}
        self._results = StepResults(
            {part: f"{self.name_of(v)} on virtual stage {v}" for v, part in self._ends.items()},
            {part: self._buffers[v].needs_copy for v, part in self._ends.items()},
        )
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
        try:
            packed = Payload.pack(output)
        except StageError as error:
            raise StageError(f"{self.name_of(v)} on virtual stage {v}: {error}") from None
        if training:
            read = [self._feeds.keys(v, (w,)) for w in self._graph.successors[v]]
            self._saved[m, v] = SavedForward.of_outputs(received, packed, read)
        return packed.sent(self._buffers[v].needs_copy)

    def _saved_loss(self, m: int, received: Received, output: Any, loss: Tensor | None) -> SavedForward:
        factor = self._batch.gradient_weights[m]
        if factor or self._joined_losses:
            return SavedForward(received, loss=loss, loss_weight=factor)
        # Why not differentiate with the factor 0? The loss of an empty microbatch may be nan, and 0 * nan is nan. The
        # backward may have to run all the same, for the other ranks of its collectives.
        outputs = tuple(t for t in tensors_in(output) if t.requires_grad) if self._grouped else ()
        return SavedForward(received, unweighted=outputs)

    def _differentiate(self, saved: SavedForward, v: int, grads: tuple[Payload, ...]) -> PendingWeights | None:
        """Run B; returns the work left to W, None if the whole backward ran."""
        roots, gradients = saved.roots(grads)
        if v in self._split:
            return self._split[v].run(roots, gradients, saved.received.tensors())
        if roots:  # autograd adds the gradients of a root that occurs twice
            run_backward(roots, gradients)
        return None

    def _loss(self, output: Any, task: Task) -> Tensor | None:
        _, m, v = task
        if (loss_fn := self._losses.get(v)) is None or (targets := self._inputs.targets(v)) is None:
            return None
        loss = loss_fn(output, targets[m])
        if isinstance(loss, Tensor):
            loss = full_tensor(loss)
        trains = requires_grad(output) or any(parameter.requires_grad for parameter in self._units[v].parameters())
        is_training = self._modes.mode is Mode.TRAIN
        checked = check_loss(loss, m, differentiable=is_training and trains)
        if is_training and v in self._unseen_losses:
            self._unseen_losses.remove(v)
            warn_of_foreign_parameters(checked, output, self._units.values())
        return checked

    def _signature(self, m: int, v: int, arguments: Any) -> Hashable:
        target = None if (targets := self._inputs.targets(v)) is None else targets[m]
        return describe(arguments), describe(target), self._modules[v].training, self._modes.autocast
