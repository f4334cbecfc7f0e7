"""Backward in two parts for any ``nn.Module``: input gradients now (B), weight gradients later (W).

Zero Bubble (Qi et al., 2023) splits backward so that the gradient other stages wait for leaves at once. Nothing in the
module changes for it here: before B the autograd graph is walked, and at each operator with a rule (`weight_rules`)
that leads to parameters, its input and the gradient of its output are kept. B asks autograd for those, for the
gradients of the received inputs, and for the gradients of all other parameters, which are *held*; autograd leaves out
the deferred products by itself. W forms the deferred gradients with autograd's own formulas, sums several uses of one
parameter in autograd's order, and adds everything to ``.grad``: bitwise what one backward would have added.

Deferred are only operators worth it: below `MIN_FLOPS` the walk and the later calls cost more than the product, which
is then formed in B and held.

Hooks: tensor hooks of a parameter make it held, so they run in B, once; post-accumulate hooks run in W. Hooks on
AccumulateGrad nodes do not run. Modules that reduce their own gradients (DistributedDataParallel, ``fully_shard``) need
those, and are not split.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from rrfp.compute.activations import Storages
from rrfp.compute.autograd_graph import AutogradGraph, Node, is_leaf
from rrfp.compute.loss_module import class_name
from rrfp.compute.received import Received
from rrfp.compute.weight_rules import PASSED_ON, RULES, Saved, rules_work
from rrfp.errors import ConfigError, StageError
from rrfp.log import get_logger

logger = get_logger(__name__)

#: Operations of a weight gradient from which on deferring it pays.
MIN_FLOPS = 3e7

Root = Tensor | GradientEdge

#: What to do with a module that differentiates only as a whole.
Unsplittable = Literal["whole", "refuse"]


@dataclass(slots=True)
class PendingWeights:
    """What B leaves for W.

    Attributes:
        held: gradients that were formed in B.
        deferred: for each operator its node, what its rule kept, the gradient of its output and the edges to follow.
        num_bytes: bytes kept, storages counted once, parameters not.
    """

    held: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    deferred: list[tuple[Node, Saved, Tensor, tuple[int, ...]]] = field(default_factory=list)
    num_bytes: int = 0

    def add_to_gradients(self) -> None:
        """W: form what was deferred, and add all to the parameters' ``.grad``. Once."""
        with torch.no_grad():
            for parameter, gradient in (*_deferred_gradients(self.deferred), *self.held):
                _accumulate(parameter, gradient)
        self.held, self.deferred, self.num_bytes = [], [], 0


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
        self._obstacle = _reduction_of_its_own(module)
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


def _reduction_of_its_own(module: nn.Module) -> str | None:
    """Why the whole backward of a module is needed by what reduces its gradients, or None."""
    for part in module.modules():
        if isinstance(part, nn.parallel.DistributedDataParallel):
            return "DistributedDataParallel reduces its gradients, by hooks on a whole backward"
        if hasattr(part, "set_requires_gradient_sync"):  # what fully_shard makes of a module
            return "fully_shard reduces its gradients, by hooks on a whole backward"
    return None


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
    plan = _Plan.of(graph, inputs, min_flops)
    wanted: list[Any] = [*inputs, *plan.held, *(GradientEdge(node, 0) for node in plan.operators)]
    if not wanted:
        return (), PendingWeights()
    # Taken now: autograd frees what it saved as it goes.
    saved = [RULES[graph.names[node]].save(node) for node in plan.operators]
    entered: list[Any] = list(roots)
    found: Sequence[Tensor | None] = torch.autograd.grad(entered, wanted, list(gradients), allow_unused=True)
    own, rest = found[: len(inputs)], found[len(inputs) :]
    held, outer = rest[: len(plan.held)], rest[len(plan.held) :]
    pending = PendingWeights(
        [(parameter, gradient) for parameter, gradient in zip(plan.held, held, strict=True) if gradient is not None],
        [
            (node, kept, gradient, plan.operators[node])
            for node, kept, gradient in zip(plan.operators, saved, outer, strict=True)
            if gradient is not None and kept is not None
        ],
    )
    pending.num_bytes = _num_bytes(pending)
    return tuple(own), pending


def nodes_of(roots: Iterable[Root]) -> list[Node]:
    """The graph nodes that backward enters by."""
    return [root.node if isinstance(root, GradientEdge) else get_gradient_edge(root).node for root in roots]


@dataclass(frozen=True, slots=True)
class _Plan:
    """Which gradients are held and which deferred.

    Attributes:
        held: parameters whose gradients B forms.
        operators: operators whose weight gradients are deferred, with the edges that lead to deferred parameters.
    """

    held: list[Tensor]
    operators: dict[Node, tuple[int, ...]]

    @classmethod
    def of(cls, graph: AutogradGraph, inputs: Sequence[Tensor], min_flops: float) -> _Plan:
        searched = _Search(graph, min_flops)
        taken = {id(tensor) for tensor in inputs}
        held: list[Tensor] = []
        operators: dict[Node, list[int]] = {}
        for node, tensor in graph.leaves():
            if id(tensor) in taken or not tensor.requires_grad:
                continue
            sources = None if tensor._backward_hooks else searched.sources(node)
            if sources is None:
                held.append(tensor)
                continue
            for operator, edge in sources:
                operators.setdefault(operator, []).append(edge)
        return cls(held, {node: tuple(sorted(edges)) for node, edges in operators.items()})


class _Search:
    """Finds, for a parameter, the operators that all of its gradient comes from."""

    def __init__(self, graph: AutogradGraph, min_flops: float) -> None:
        self._graph = graph
        self._min_flops = min_flops if rules_work() else float("inf")
        self._is_worth: dict[Node, bool] = {}

    def sources(self, node: Node) -> list[tuple[Node, int]] | None:
        """(operator, edge) pairs that lead to ``node``, directly or passed on; None where anything else does."""
        if node in self._graph.roots:
            return None
        found: list[tuple[Node, int]] = []
        for before, edge in self._graph.incoming.get(node, ()):
            if self._graph.names[before] in PASSED_ON:
                further = self.sources(before)
                if further is None:
                    return None
                found += further
            elif self._defers(before, edge):
                found.append((before, edge))
            else:
                return None
        return list(dict.fromkeys(found))

    def _defers(self, node: Node, edge: int) -> bool:
        rule = RULES.get(self._graph.names[node])
        if rule is None or edge not in rule.edges:
            return False
        if node not in self._is_worth:
            # First whether it keeps them: reading a saved tensor runs the hook that it is behind.
            is_worth = rule.keeps(node) and rule.flops(node) >= self._min_flops
            self._is_worth[node] = is_worth and rule.save(node) is not None
        return self._is_worth[node]


def _deferred_gradients(deferred: Iterable[tuple[Node, Saved, Tensor, tuple[int, ...]]]) -> list[tuple[Tensor, Tensor]]:
    """The gradient of each deferred parameter, summed over its uses in the order in which autograd would.

    autograd runs the latest operator of the forward first, and a node once all that leads to it has run; so does this.
    """
    operators = {node: (saved, outer, edges) for node, saved, outer, edges in deferred}
    queue = [(-node._sequence_nr(), place, node) for place, node in enumerate(operators)]
    heapq.heapify(queue)
    arrived: dict[Node, Tensor] = {}

    def deliver(source: Node, edge: int, gradient: Tensor) -> None:
        following, _ = source.next_functions[edge]
        before = arrived.get(following)
        gradient = gradient.sum_to_size(following._input_metadata[0].shape)
        if not is_leaf(following) and before is None:
            heapq.heappush(queue, (-following._sequence_nr(), len(operators) + len(arrived), following))
        arrived[following] = gradient if before is None else before + gradient

    while queue:
        _, _, node = heapq.heappop(queue)
        if node in operators:
            saved, outer, edges = operators[node]
            for edge in edges:
                deliver(node, edge, RULES[node.name()].gradient(saved, edge, outer))
        else:
            deliver(node, 0, _through(node, arrived.pop(node)))
    return [(node.variable, gradient) for node, gradient in arrived.items()]


def _through(node: Node, gradient: Tensor) -> Tensor:
    """What a node that passes gradients on makes of one."""
    passed = node(gradient)
    result: Tensor = passed[0] if isinstance(passed, tuple) else passed
    return result


def _accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """Add to ``.grad`` as autograd does, and run what is hooked behind it."""
    if parameter.grad is not None:
        parameter.grad += gradient
    elif gradient.stride() == parameter.stride() and gradient.dtype == parameter.dtype:
        parameter.grad = gradient.detach()
    else:
        parameter.grad = torch.empty_like(parameter).copy_(gradient)
    for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
        hook(parameter)


def _num_bytes(pending: PendingWeights) -> int:
    """Bytes of all storages kept, each once, without those of parameters."""
    storages = Storages()
    kept = [gradient for _, gradient in pending.held]
    for _, saved, outer, _ in pending.deferred:
        kept += [tensor for tensor in (*saved.tensors, outer) if not isinstance(tensor, nn.Parameter)]
    for tensor in kept:
        storages.add(tensor)
    return storages.num_bytes
