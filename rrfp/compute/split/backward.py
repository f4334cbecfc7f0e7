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

from rrfp.compute.gradients.module_checks import needs_whole_backward
from rrfp.compute.loss import class_name
from rrfp.compute.split.autograd_graph import (
    AutogradGraph,
    Node,
    OuterGradients,
    Root,
    has_hooks,
    run_backward,
    run_grad,
)
from rrfp.compute.split.pending_weights import Deferred, PendingWeights
from rrfp.compute.split.weight_rules import RULES, VIEWS_AND_CASTS, rules_work
from rrfp.errors import StageError
from rrfp.log import get_logger
from rrfp.plain import one_of


def _held_and_deferred(
    graph: AutogradGraph, inputs: Sequence[Tensor], min_flops: float
) -> tuple[list[Node], dict[Node, tuple[int, ...]]]:
    """The nodes of held parameters; the deferred operators, with their edges that lead to deferred parameters."""
    search = _Search(graph, min_flops)
    input_ids = {id(tensor) for tensor in inputs}
    held: list[Node] = []
    operators: dict[Node, list[int]] = {}
    for node, tensor in graph.leaves():
        if id(tensor) in input_ids or not tensor.requires_grad:
            continue
        sources = None if tensor._backward_hooks else search.sources(node)
        if sources is None:
            held.append(node)
            continue
        for operator, edge in sources:
            operators.setdefault(operator, []).append(edge)
    return held, {node: tuple(sorted(edges)) for node, edges in operators.items()}


class _Search:
    """Finds the operators that together produce the whole gradient of a parameter."""

    def __init__(self, graph: AutogradGraph, min_flops: float) -> None:
        self._graph = graph
        self._min_flops = min_flops if rules_work() else float("inf")
        self._deferrable: dict[Node, bool] = {}

    def sources(self, node: Node) -> list[tuple[Node, int]] | None:
        """(operator, edge) pairs that lead to ``node`` by views; or None."""
        if node in self._graph.roots:
            return None
        incoming = self._graph.incoming.get(node, ())
        indirect = [self._graph.names[before] in VIEWS_AND_CASTS for before, _ in incoming]
        if len(incoming) > 2 and any(indirect) and not all(indirect):
            # Why not defer? W would add the direct ones first, which changes the bits of a sum of three.
            return None
        sources: list[tuple[Node, int]] = []
        for (before, edge), is_indirect in zip(incoming, indirect, strict=True):
            if is_indirect:
                further = self.sources(before)
                if further is None:
                    return None
                sources += further
            elif self._defers(before, edge):
                sources.append((before, edge))
            else:
                return None
        return list(dict.fromkeys(sources))

    def _defers(self, node: Node, edge: int) -> bool:
        rule = RULES.get(self._graph.names[node])
        if rule is None or edge not in rule.edges:
            return False
        if node not in self._deferrable:
            # `can_read` comes first: all others read saved tensors, which a checkpoint would recompute for that.
            self._deferrable[node] = (
                rule.can_read(node)
                and rule.flops(node) >= self._min_flops
                and rule.save(node) is not None
                and not has_hooks(node)
            )
        return self._deferrable[node]


logger = get_logger(__name__)

#: Floating-point operations of the smallest weight gradient that is deferred.
MIN_FLOPS = 3e7

#: How to run a module that differentiates only as a whole.
Unsplittable = Literal["whole", "refuse"]


class SplitBackward:
    """B and W of one virtual stage, from the autograd graph of each forward; hooks run once.

    Args:
        module: of the virtual stage.
        virtual_stage: its index, for messages.
        unsplittable: what to do where a backward is only possible as a whole: ``"whole"`` runs it in B, with one
            warning, and ``"refuse"`` raises a StageError.
        may_reduce: whether hooks of ``fully_shard`` reduce gradients in a backward, which then runs as a whole.

    Raises:
        ConfigError: for an unknown value of ``unsplittable``.
    """

    def __init__(
        self,
        module: nn.Module,
        virtual_stage: int,
        unsplittable: Unsplittable = "whole",
        *,
        may_reduce: bool = True,
    ) -> None:
        one_of(get_args(Unsplittable), "unsplittable", unsplittable)
        self._name = f"{class_name(module)} on virtual stage {virtual_stage}"
        self._unsplittable = unsplittable
        self._obstacle = needs_whole_backward(module) if may_reduce else None
        self._has_warned = False

    def run(
        self, roots: Sequence[Root], gradients: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> PendingWeights | None:
        """B: set ``.grad`` of the inputs that require grad.

        Args:
            roots: where backward enters: outputs, or their gradient edges.
            gradients: of the roots.
            inputs: the leaves that are no parameters.

        Returns:
            The work left to W, which its method ``add_to_gradients`` does; None if there is none. That raises a
            StageError if a tensor which it needs was written meanwhile.

        Raises:
            StageError: if the module cannot be split, and ``unsplittable`` is ``"refuse"``.
        """
        if not roots:
            return None
        graph = AutogradGraph.walk(nodes_of(roots))
        if (obstacle := self._obstacle or graph.obstacle()) is not None:
            self._report(obstacle)
            run_backward(roots, gradients)
            return None
        leaves = [tensor for tensor in inputs if tensor.requires_grad]
        input_grads, pending = input_gradients(roots, gradients, leaves, min_flops=MIN_FLOPS, graph=graph)
        for leaf, gradient in zip(leaves, input_grads, strict=True):
            leaf.grad = gradient
        pending.owner = self._name
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
    """B: the gradients of ``inputs``, and the pending weights of all other leaves that require grad."""
    if graph is None:
        graph = AutogradGraph.walk(nodes_of(roots))
    held, operators = _held_and_deferred(graph, inputs, min_flops)
    parameters = [node.variable for node in held]
    targets: list[Any] = [*inputs, *parameters, *(GradientEdge(node, 0) for node in operators)]
    if not targets:
        return (), PendingWeights()
    # Saved before the call, because autograd frees its own saved tensors during it.
    saved = {node: RULES[graph.names[node]].save(node) for node in operators}
    with OuterGradients(operators) as outer:
        results = run_grad(roots, gradients, targets)
    input_grads, rest = results[: len(inputs)], results[len(inputs) :]
    output_grads = {**dict(zip(operators, rest[len(parameters) :], strict=True)), **outer.by_node}
    return tuple(input_grads), PendingWeights(
        [(node, gradient) for node, gradient in zip(held, rest, strict=False) if gradient is not None],
        [
            Deferred(node, kept, gradient, operators[node])
            for node, gradient in output_grads.items()
            if gradient is not None and (kept := saved[node]) is not None
        ],
    )


def nodes_of(roots: Iterable[Root]) -> list[Node]:
    return [root.node if isinstance(root, GradientEdge) else get_gradient_edge(root).node for root in roots]
