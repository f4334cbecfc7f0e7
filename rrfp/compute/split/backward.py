"""Backward in two parts for any ``nn.Module``: input gradients now (B), weight gradients later (W).

Zero Bubble (Qi et al., 2023) splits backward so that the gradient for the previous stage is sent at once. The module
does not change: before B the autograd graph is walked, and each operator with a rule (`weight_rules`) that leads to
parameters is *deferred*: its input and the gradient of its output are kept. B asks autograd for the gradients of those
outputs, of the received inputs, and of all other parameters, which are *held*; autograd leaves out every product that
is not asked for. W (`pending_weights`) computes the deferred gradients by autograd's own formulas and lets autograd
accumulate them: bitwise the same ``.grad`` as after one backward.

Why not defer every operator? Below `MIN_FLOPS` the walk and the later calls cost more than the product, which is then
computed in B and held.

Why not run ``autograd.grad`` twice, for inputs and then for weights? The second run would compute the gradients of all
activations once more.

Hooks run as often as in one backward, with the same gradients. Hooks in front of a deferred operator run in B, before
the gradient of its output is kept; hooks of a view or cast of its weight run in W. An operator with hooks on its node
is not deferred, nor is a parameter with a tensor hook. Post-accumulate hooks and hooks of AccumulateGrad nodes run in
W.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from rrfp.compute import engine
from rrfp.compute.engine import Root
from rrfp.compute.gradients.module_reduction import needs_whole_backward
from rrfp.compute.loss_module import class_name
from rrfp.compute.received import Received
from rrfp.compute.split.autograd_graph import AutogradGraph, Node, OuterGradients
from rrfp.compute.split.deferral import Deferral
from rrfp.compute.split.pending_weights import Deferred, PendingWeights
from rrfp.compute.split.weight_rules import RULES
from rrfp.errors import ConfigError, StageError
from rrfp.log import get_logger

logger = get_logger(__name__)

#: Floating-point operations of the smallest weight gradient that is deferred.
MIN_FLOPS = 3e7

#: How to run a module that differentiates only as a whole.
Unsplittable = Literal["whole", "refuse"]


class SplitBackward:
    """B of one virtual stage; a ConfigError for an unknown value of ``unsplittable``."""

    def __init__(self, module: nn.Module, virtual_stage: int, unsplittable: Unsplittable = "whole") -> None:
        if unsplittable not in get_args(Unsplittable):
            raise ConfigError(f"unsplittable is {unsplittable!r}, must be one of: {', '.join(get_args(Unsplittable))}")
        self._name = f"{class_name(module)} on virtual stage {virtual_stage}"
        self._unsplittable = unsplittable
        self._obstacle = needs_whole_backward(module)
        self._has_warned = False

    def run(self, roots: Sequence[Root], gradients: Sequence[Tensor], received: Received) -> PendingWeights | None:
        """Set the gradients of the received leaves; returns the work left to W, None if the whole backward ran.

        Raises:
            StageError: if the module cannot be split, and ``unsplittable`` is ``"refuse"``.
        """
        if not roots:
            return None
        graph = AutogradGraph.walk(nodes_of(roots))
        if (obstacle := self._obstacle or graph.obstacle()) is not None:
            self._report(obstacle)
            engine.backward(roots, gradients)
            return None
        leaves = [tensor for tensor in received.tensors() if tensor.requires_grad]
        input_grads, pending = input_gradients(roots, gradients, leaves, min_flops=MIN_FLOPS, graph=graph)
        for leaf, gradient in zip(leaves, input_grads, strict=True):
            leaf.grad = gradient
        return pending

    def _report(self, obstacle: str) -> None:
        if self._unsplittable == "refuse":
            raise StageError(f"the backward of {self._name} cannot be split: {obstacle}")
        if not self._has_warned:
            logger.warning("the backward of %s is not split: %s", self._name, obstacle)
            self._has_warned = True


def input_gradients(
    roots: Sequence[Root],
    gradients: Sequence[Tensor],
    inputs: Sequence[Tensor],
    *,
    min_flops: float = MIN_FLOPS,
    graph: AutogradGraph | None = None,
) -> tuple[tuple[Tensor | None, ...], PendingWeights]:
    """B: the gradients of ``inputs``, and the pending weights of all other leaves that require grad.

    Args:
        roots: where backward enters: outputs, or their gradient edges.
        gradients: of the roots.
        inputs: leaves whose gradients are returned and not accumulated.
        min_flops: operators whose weight gradient takes fewer operations are not deferred.
        graph: the graph of the roots, if it has been walked.

    Returns:
        One gradient for each input, None if none reaches it; and the pending weights.
    """
    if graph is None:
        graph = AutogradGraph.walk(nodes_of(roots))
    deferral = Deferral.of(graph, inputs, min_flops)
    parameters = [node.variable for node in deferral.held]
    targets: list[Any] = [*inputs, *parameters, *(GradientEdge(node, 0) for node in deferral.operators)]
    if not targets:
        return (), PendingWeights()
    # Saved before the call, because autograd frees its own saved tensors during it.
    saved = {node: RULES[graph.names[node]].save(node) for node in deferral.operators}
    with OuterGradients(deferral.operators) as outer:
        results = engine.grad(roots, gradients, targets)
    input_grads, rest = results[: len(inputs)], results[len(inputs) :]
    held = zip(deferral.held, rest, strict=False)
    output_grads = {**dict(zip(deferral.operators, rest[len(parameters) :], strict=True)), **outer.by_node}
    return tuple(input_grads), PendingWeights(
        [(node, gradient) for node, gradient in held if gradient is not None],
        [
            Deferred(node, kept, gradient, deferral.operators[node])
            for node, gradient in output_grads.items()
            if gradient is not None and (kept := saved[node]) is not None
        ],
    )


def nodes_of(roots: Iterable[Root]) -> list[Node]:
    """The graph nodes at which backward enters."""
    return [root.node if isinstance(root, GradientEdge) else get_gradient_edge(root).node for root in roots]
