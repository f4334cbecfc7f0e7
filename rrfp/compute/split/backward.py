"""Backward in two parts for any ``nn.Module``: input gradients now (B), weight gradients later (W).

Zero Bubble (Qi et al., 2023) splits backward so that the gradient other stages wait for leaves at once. Nothing in the
module changes for it here: before B the autograd graph is walked, and at each operator with a rule (`weight_rules`)
that leads to parameters, its input and the gradient of its output are kept. B asks autograd for those, for the
gradients of the received inputs, and for the gradients of all other parameters, which are *held*; autograd leaves out
the deferred products by itself. W (`pending_weights`) forms the deferred gradients with autograd's own formulas and
lets autograd do the rest: bitwise what one backward would have added to ``.grad``.

Deferred are only operators worth it: below `MIN_FLOPS` the walk and the later calls cost more than the product, which
is then formed in B and held.

Hooks run as often as in one backward, with the same gradients. Those in front of a deferred operator run in B, before
the gradient of its output is kept; those of a view or cast of its weight in W. An operator whose node is hooked is not
deferred, nor is a parameter with a tensor hook. Post-accumulate hooks and those of AccumulateGrad nodes run in W.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from rrfp.compute.gradients.module_reduction import needs_whole_backward
from rrfp.compute.loss_module import class_name
from rrfp.compute.received import Received
from rrfp.compute.split.autograd_graph import AutogradGraph, Node, OuterGradients
from rrfp.compute.split.deferral import Deferral
from rrfp.compute.split.pending_weights import Deferred, PendingWeights
from rrfp.compute.split.weight_rules import RULES, rules_work
from rrfp.errors import ConfigError, StageError
from rrfp.log import get_logger

logger = get_logger(__name__)

#: Operations of a weight gradient from which on deferring it pays.
MIN_FLOPS = 3e7

Root = Tensor | GradientEdge

#: What to do with a module that differentiates only as a whole.
Unsplittable = Literal["whole", "refuse"]


class SplitBackward:
    """B of one virtual stage.

    Args:
        module: its module, for messages.
        virtual_stage: its index, for messages.
        unsplittable: what to do where the module differentiates only as a whole.

    Raises:
        ConfigError: for an unknown choice.
    """

    def __init__(self, module: nn.Module, virtual_stage: int, unsplittable: Unsplittable = "whole") -> None:
        if unsplittable not in get_args(Unsplittable):
            raise ConfigError(f"unsplittable is {unsplittable!r}, must be one of: {', '.join(get_args(Unsplittable))}")
        self._name = f"{class_name(module)} on virtual stage {virtual_stage}"
        self._unsplittable = unsplittable
        self._obstacle = needs_whole_backward(module)
        self._told = False
        rules_work()  # tried out here, not in the first task, where a caller's modes would see it

    def run(self, roots: Sequence[Root], gradients: Sequence[Tensor], received: Received) -> PendingWeights:
        """Give the received leaves their gradients; see `input_gradients`.

        Raises:
            StageError: if the module cannot be split and that is refused.
        """
        if not roots:
            return PendingWeights()
        graph = AutogradGraph.walk(nodes_of(roots))
        if (obstacle := self._obstacle or graph.obstacle()) is not None:
            self._tell(obstacle)
            torch.autograd.backward(list(roots), list(gradients))  # type: ignore[arg-type]
            return PendingWeights()
        leaves = [tensor for tensor in received.tensors() if tensor.requires_grad]
        found, pending = input_gradients(roots, gradients, leaves, min_flops=MIN_FLOPS, graph=graph)
        for leaf, gradient in zip(leaves, found, strict=True):
            leaf.grad = gradient
        return pending

    def _tell(self, obstacle: str) -> None:
        if self._unsplittable == "refuse":
            raise StageError(f"the backward of {self._name} cannot be split: {obstacle}")
        if not self._told:
            logger.warning("the backward of %s is not split: %s", self._name, obstacle)
            self._told = True


def input_gradients(
    roots: Sequence[Root],
    gradients: Sequence[Tensor],
    inputs: Sequence[Tensor],
    *,
    min_flops: float = MIN_FLOPS,
    graph: AutogradGraph | None = None,
) -> tuple[tuple[Tensor | None, ...], PendingWeights]:
    """B: the gradients of ``inputs``, and what W needs for everything else that requires grad.

    Args:
        roots: where backward enters: outputs, or their gradient edges.
        gradients: of the roots.
        inputs: leaves whose gradients are wanted now; they are not accumulated.
        min_flops: operators whose weight gradient takes fewer operations are not deferred.
        graph: of the roots, if it was walked before.

    Returns:
        One gradient for each input, None where none reaches it; and the pending weights.
    """
    if graph is None:
        graph = AutogradGraph.walk(nodes_of(roots))
    deferral = Deferral.of(graph, inputs, min_flops)
    parameters = [node.variable for node in deferral.held]
    wanted: list[Any] = [*inputs, *parameters, *(GradientEdge(node, 0) for node in deferral.operators)]
    if not wanted:
        return (), PendingWeights()
    # Taken now: autograd frees what it saved as it goes.
    saved = {node: RULES[graph.names[node]].save(node) for node in deferral.operators}
    entered: list[Any] = list(roots)
    with OuterGradients(deferral.operators) as outer:
        found: Sequence[Tensor | None] = torch.autograd.grad(entered, wanted, list(gradients), allow_unused=True)
    own, rest = found[: len(inputs)], found[len(inputs) :]
    held = zip(deferral.held, rest, strict=False)
    told = {**dict(zip(deferral.operators, rest[len(parameters) :], strict=True)), **outer.found}
    return tuple(own), PendingWeights(
        [(node, gradient) for node, gradient in held if gradient is not None],
        [
            Deferred(node, kept, gradient, deferral.operators[node])
            for node, gradient in told.items()
            if gradient is not None and (kept := saved[node]) is not None
        ],
    )


def nodes_of(roots: Iterable[Root]) -> list[Node]:
    """The graph nodes that backward enters by."""
    return [root.node if isinstance(root, GradientEdge) else get_gradient_edge(root).node for root in roots]
