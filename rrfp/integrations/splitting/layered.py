"""A model as a chain of layers that can be cut between any two: what `rrfp.split` needs to know of one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


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
    """See the module's docstring."""

    #: The whole model.
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

    @abstractmethod
    def parts(self, cuts: Sequence[int]) -> list[nn.Module]:
        """The parts of the model, one more than ``cuts``, the first layers of all parts but the first.

        Parameters and saved buffers are the model's own objects, under the model's own names.
        """

    def run(self, sample: Sample) -> tuple[Any, Tensor | None]:
        """The whole model's output, and its own loss, if it has one and the sample a target."""
        return sample.call(self.model), None

    @abstractmethod
    def sample(self) -> Sample | None:
        """A tiny batch, the same in every call; None where only the caller knows one."""


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Puts all modules of ``models`` into eval mode for a while: no dropout, and no statistics are written."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in a nesting of tuples, lists and dicts, in order."""
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return [tensor for item in items for tensor in tensors_of(item)]
