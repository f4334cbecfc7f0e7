"""Which gradients of a graph B forms, and which it leaves to W."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from rrfp.compute.split.autograd_graph import AutogradGraph, Node, has_hooks
from rrfp.compute.split.weight_rules import PASSED_ON, RULES, rules_work


@dataclass(frozen=True, slots=True)
class Deferral:
    """Which gradients are held and which deferred.

    Attributes:
        held: AccumulateGrad nodes of the parameters whose gradients B forms.
        operators: operators whose weight gradients are deferred, with the edges that lead to deferred parameters.
    """

    held: list[Node]
    operators: dict[Node, tuple[int, ...]]

    @classmethod
    def of(cls, graph: AutogradGraph, inputs: Sequence[Tensor], min_flops: float) -> Deferral:
        """Decide for all parameters of ``graph``.

        Args:
            graph: what B differentiates.
            inputs: leaves that are no parameters.
            min_flops: operators whose weight gradient takes fewer operations are not deferred.
        """
        searched = _Search(graph, min_flops)
        taken = {id(tensor) for tensor in inputs}
        held: list[Node] = []
        operators: dict[Node, list[int]] = {}
        for node, tensor in graph.leaves():
            if id(tensor) in taken or not tensor.requires_grad:
                continue
            sources = None if tensor._backward_hooks else searched.sources(node)
            if sources is None:
                held.append(node)
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
        incoming = self._graph.incoming.get(node, ())
        passed = [self._graph.names[before] in PASSED_ON for before, _ in incoming]
        if len(incoming) > 2 and any(passed) and not all(passed):
            return None  # in W those not passed on are added first, which changes the bits of a sum of three
        found: list[tuple[Node, int]] = []
        for (before, edge), is_passed in zip(incoming, passed, strict=True):
            if is_passed:
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
            # In this order: only `keeps` does not read what a checkpoint would recompute for it.
            self._is_worth[node] = (
                rule.keeps(node)
                and rule.flops(node) >= self._min_flops
                and rule.save(node) is not None
                and not has_hooks(node)
            )
        return self._is_worth[node]
