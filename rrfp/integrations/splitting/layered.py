"""A model as a chain of layers: tried on a sample, and measured layer by layer."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rrfp.compute.activations import ActivationMeter, tensors_in
from rrfp.compute.buffers import writes_buffers_in_forward
from rrfp.errors import ConfigError
from rrfp.integrations.buffers import restored_buffers
from rrfp.integrations.splitting.cuts import LayerCosts
from rrfp.integrations.splitting.weights import Weights


@dataclass(frozen=True, slots=True)
class Sample:
    """A batch on which a model can be tried."""

    #: Arguments of the first stage, as an entry of ``inputs`` of a step: a tensor, a tuple or a dict.
    inputs: Any
    #: For the loss; None where the model has no loss of its own.
    target: Tensor | None = None

    def call(self, *modules: nn.Module) -> Any:
        """The output of a whole model, or of its parts in turn."""
        value = self.inputs
        for module in modules:
            if isinstance(value, Mapping):
                value = module(**value)
            else:
                value = module(*value) if isinstance(value, tuple) else module(value)
        return value


class Layered(ABC):
    """A model as a chain of layers, cut between any two."""

    model: nn.Module
    #: Modules that run ahead of the first layer, such as an embedding; always in the first part.
    before: Sequence[nn.Module]
    #: The modules between which cuts may be made, in order.
    layers: Sequence[nn.Module]
    #: Modules that run behind the last layer, such as a head; always in the last part.
    after: Sequence[nn.Module]
    #: The model's own loss, ``loss_fn(output, target)``; None if it has none.
    loss_fn: Callable[[Any, Any], Tensor] | None = None
    #: Whether RRFP's tests compare the parts of such a model with the whole.
    is_tested: bool = False
    #: Tensors of the model that its own forward is known to write.
    written: Sequence[Tensor] = ()

    @abstractmethod
    def parts(self, cuts: Sequence[int]) -> list[nn.Module]:
        """The parts of the model, one more than ``cuts``, the first layers of all parts but the first.

        Parameters and saved buffers are the model's own objects, under the model's own names.
        """

    def run(self, sample: Sample) -> tuple[Any, Tensor | None]:
        """The whole model's output, and its own loss if it can."""
        return sample.call(self.model), None

    def call_layers(self, sample: Sample) -> None:
        """Call each layer once, with what the whole model calls it with."""
        self.run(sample)

    def named_cuts(self, cuts: Sequence[int]) -> list[Any]:
        return list(cuts)

    def weights(self) -> Weights:
        return Weights(self.model)

    @abstractmethod
    def sample(self) -> Sample | None:
        """A tiny constant batch; None where only the caller knows one."""


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """All modules in eval mode: no dropout, no statistics written; what writes buffers all the same is undone."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        with restored_buffers(models):
            yield
    finally:
        for module, training in modes:
            module.training = training


def check_hooks_and_forward(model: nn.Module, *, only_backward: bool = False) -> None:
    """Raise a ConfigError for hooks of a module that is cut, or a forward that was put in place of its class's."""
    if not only_backward and "forward" in vars(model):
        raise ConfigError(
            f"model has a forward of its own on a {type(model).__name__} that is cut, must have it in a subclass or on "
            "modules within a part: no part would call it as the whole does"
        )
    forward = [] if only_backward else [*model._forward_hooks, *model._forward_pre_hooks]
    if forward or model._backward_hooks or model._backward_pre_hooks:
        which = "forward" if forward else "backward"
        raise ConfigError(
            f"model has {which} hooks on a {type(model).__name__} that is cut, must have them on modules within a "
            "part: no part would call them as the whole does"
        )


def check_shared_buffers(layered: Layered, parts: Sequence[nn.Module]) -> None:
    """Raise a ConfigError for a buffer that several parts have and a forward writes: each would have its own values."""
    written = {id(tensor) for tensor in layered.written}
    holders: dict[int, int] = {}
    for index, part in enumerate(parts):
        for path, module in part.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is None or holders.setdefault(id(buffer), index) == index:
                    continue
                is_norm = not module._modules and writes_buffers_in_forward(module)
                if is_norm or id(buffer) in written:
                    raise ConfigError(
                        f"model is a {type(layered.model).__name__} whose forward writes the buffer "
                        f"{'.'.join(filter(None, (path, name)))!r}, which parts {holders[id(buffer)]} and {index} both "
                        "use: must be used in one part; cut it elsewhere"
                    )


#: Each layer runs so often; the shortest time counts.
REPEATS = 3


@dataclass(frozen=True, slots=True)
class MeasuredPiece:
    """What some modules of a model take on a sample, one after the other."""

    #: Of the modules, in the whole model.
    names: tuple[str, ...]
    #: Seconds.
    forward: float
    backward: float
    #: That autograd keeps between the two.
    num_bytes: int


@dataclass(frozen=True, slots=True)
class MeasuredLayers:
    """What each layer takes on a sample, and what runs ahead of the first and behind the last one."""

    before: MeasuredPiece
    layers: tuple[MeasuredPiece, ...]
    after: MeasuredPiece

    @property
    def costs(self) -> LayerCosts:
        """Seconds of forward and backward."""
        before, after, *layers = (each.forward + each.backward for each in (self.before, self.after, *self.layers))
        return LayerCosts(before, layers, after)

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)


def measure(layered: Layered, sample: Sample) -> MeasuredLayers:
    """Each layer on its own, in eval mode."""
    names = {module: name for name, module in layered.model.named_modules()}
    with torch.random.fork_rng(), evaluating(layered.model):
        calls = _calls(layered, sample)

        def piece(*modules: nn.Module) -> MeasuredPiece:
            taken = [_taken(module, *calls[module]) for module in modules if module in calls]
            forward, backward, num_bytes = map(sum, zip(*taken, strict=True)) if taken else (0.0, 0.0, 0)
            return MeasuredPiece(tuple(names.get(module, "") for module in modules), forward, backward, int(num_bytes))

        return MeasuredLayers(piece(*layered.before), tuple(map(piece, layered.layers)), piece(*layered.after))


#: By module, the positional and keyword arguments of its first call.
_Calls = dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]]


def _calls(layered: Layered, sample: Sample) -> _Calls:
    calls: _Calls = {}

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.setdefault(module, (args, kwargs))

    with ExitStack() as stack, torch.no_grad():
        for module in {*layered.before, *layered.layers, *layered.after}:
            stack.callback(module.register_forward_pre_hook(record, with_kwargs=True).remove)
        layered.call_layers(sample)
    return calls


def _taken(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[float, float, int]:
    """Seconds of a forward and of a backward, and the bytes that are kept between."""
    args = tuple(_learning(value) for value in args)
    kwargs = {name: _learning(value) for name, value in kwargs.items()}
    wanted = [tensor for tensor in (*tensors_in((args, kwargs)), *module.parameters()) if tensor.requires_grad]
    forward: list[float] = []
    backward: list[float] = []
    with torch.enable_grad():
        # Counted apart from the times: hooks that see every saved tensor take some.
        own, named = _fresh(args, kwargs)
        _, kept = ActivationMeter(module).run(lambda: module(*own, **named), None, ())
        for _ in range(REPEATS):
            own, named = _fresh(args, kwargs)
            with _timed(wanted, forward):
                outputs = [tensor for tensor in tensors_in(module(*own, **named)) if tensor.requires_grad]
            with _timed(wanted, backward):
                if outputs:
                    ones = [torch.ones_like(tensor) for tensor in outputs]
                    torch.autograd.grad(outputs, wanted, ones, allow_unused=True)
    return min(forward), min(backward), kept.held


def _learning(value: Any) -> Any:
    """A floating tensor as a leaf that requires grad; others unchanged."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().requires_grad_()
    return value


def _fresh(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copies with a history: a layer such as an in-place ReLU writes into what it is given."""

    def copied(value: Any) -> Any:
        return value.clone() if isinstance(value, Tensor) else value

    return tuple(map(copied, args)), {name: copied(value) for name, value in kwargs.items()}


@contextmanager
def _timed(tensors: Sequence[Tensor], taken: list[float]) -> Iterator[None]:
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    for device in devices:
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    yield
    for device in devices:
        torch.cuda.synchronize(device)
    taken.append(time.perf_counter() - start)
