"""The work that B leaves to W, and W itself: autograd continues where B stopped.

W computes the gradients that single operators send to their weights and enters autograd behind these operators. Then
autograd does the rest: views and casts of weights with their hooks, sums of several uses, hooks of AccumulateGrad
nodes, adding to ``.grad`` (dense or sparse), post-accumulate hooks. A gradient that B computed enters at its parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from rrfp.compute.activations import Storages, storage_pointer
from rrfp.compute.split.autograd_graph import Node, is_leaf, run_backward
from rrfp.compute.split.weight_rules import RULES, Saved
from rrfp.errors import StageError


class Deferred(NamedTuple):
    """An operator whose weight gradients W computes."""

    node: Node
    #: The tensors that its rule kept.
    saved: Saved
    #: The gradient of its output, after all hooks.
    outer: Tensor
    #: Positions of its inputs that lead to parameters.
    edges: tuple[int, ...]


@dataclass(slots=True)
class PendingWeights:
    """The work that B leaves to W."""

    #: Gradients that B computed, after the parameters' tensor hooks, each with the AccumulateGrad node of its
    #: parameter.
    held: list[tuple[Node, Tensor]] = field(default_factory=list)
    #: Operators whose weight gradients B did not compute.
    deferred: list[Deferred] = field(default_factory=list)
    #: Bytes kept, storages counted once, parameters not.
    num_bytes: int = field(init=False)
    #: Whose work it is, for errors.
    owner: str = "a module"
    _versions: list[tuple[Tensor, int]] = field(init=False)

    def __post_init__(self) -> None:
        storages = Storages()
        kept = [gradient for _, gradient in self.held]
        for operator in self.deferred:
            kept += [*operator.saved.tensors, operator.outer]
        for tensor in kept:
            if not isinstance(tensor, nn.Parameter):
                storages.add(tensor)
        self.num_bytes = storages.num_bytes
        # autograd has checked what it saved, but only up to now.
        self._versions = [(tensor, tensor._version) for tensor in kept if not tensor.is_inference()]

    def add_to_gradients(self) -> None:
        """W: add the deferred and the held gradients to ``.grad``, once."""
        if any(tensor._version != version for tensor, version in self._versions):
            raise StageError(
                f"a tensor that {self.owner} saved for its backward was written between B and W: use an out-of-place "
                "operation, or write into a clone (x = x.clone())"
            )
        entrances = _Entrances()
        gradients: list[Tensor] = []
        if self.deferred:
            with torch.no_grad():
                gradients += self._deferred_gradients(entrances)
        for node, gradient in self.held:
            gradients.append(gradient)
            entrances.edges.append(GradientEdge(node, 0))
        with _without_tensor_hooks(node.variable for node, _ in self.held):
            if gradients:
                run_backward(entrances.edges, gradients)
        self.held, self.deferred, self.num_bytes, self._versions = [], [], 0, []

    def _deferred_gradients(self, entrances: _Entrances) -> Iterator[Tensor]:
        # The latest operator of the forward first, as in autograd: the order of entries fixes the order of sums.
        for node, saved, outer, edges in sorted(self.deferred, key=lambda each: -int(each.node._sequence_nr())):
            for edge in edges:
                gradient = RULES[node.name()].gradient(saved, edge, outer)
                yield entrances.add(GradientEdge(*node.next_functions[edge]), gradient, outer)


class _Entrances:
    """The edges of the graph at which W enters."""

    # Why through views? autograd adopts a gradient as `.grad` only if nothing else refers to it, and copies it
    # otherwise. W refers to all gradients that it enters with. So if adoption is right (a new product, and no `.grad`
    # yet), the gradient enters at a view of the parameter, behind which only autograd refers to it.

    def __init__(self) -> None:
        self.edges: list[GradientEdge] = []
        self._views: dict[Node, Node] = {}

    def add(self, edge: GradientEdge, gradient: Tensor, outer: Tensor) -> Tensor:
        """Enter at ``edge``; returns the gradient, summed to the shape of that edge."""
        following: Node = edge.node
        gradient = gradient.sum_to_size(following._input_metadata[edge.output_nr].shape)
        if is_leaf(following) and self._may_be_adopted(following, gradient, outer):
            edge = GradientEdge(self._views[following], 0)
        self.edges.append(edge)
        return gradient

    def _may_be_adopted(self, leaf: Node, gradient: Tensor, outer: Tensor) -> bool:
        parameter = leaf.variable
        if leaf in self._views:
            return True
        if parameter.grad is not None or not parameter.requires_grad:
            return False
        if storage_pointer(gradient) == storage_pointer(outer):
            return False
        with torch.enable_grad():
            self._views[leaf] = parameter.view_as(parameter).grad_fn
        return True


@contextmanager
def _without_tensor_hooks(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Within, tensor hooks of ``parameters`` do not run: they ran in B."""
    hooked = [(hooks, dict(hooks)) for parameter in parameters if (hooks := parameter._backward_hooks)]
    for hooks, _ in hooked:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, kept in hooked:
            hooks.update(kept)
