"""The choice of the gradients that B computes and holds, and of those that it defers to W."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from rrfp.compute.split.autograd_graph import AutogradGraph, Node, has_hooks
from rrfp.compute.split.weight_rules import RULES, VIEWS_AND_CASTS, rules_work


@dataclass(frozen=True, slots=True)
class Deferral:
    """The gradients that are held and those that are deferred.

    Attributes:
        held: AccumulateGrad nodes of the parameters whose gradients B computes.
        operators: operators whose weight gradients are deferred, with the edges that lead to deferred parameters.
    """

    held: list[Node]
    operators: dict[Node, tuple[int, ...]]

    @classmethod
    def of(cls, graph: AutogradGraph, inputs: Sequence[Tensor], min_flops: float) -> Deferral:
        """Decide for all parameters of ``graph``; ``inputs`` are its leaves that are no parameters."""
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
        return cls(held, {node: tuple(sorted(edges)) for node, edges in operators.items()})


class _Search:
    """Finds the operators that together produce the whole gradient of a parameter."""

    def __init__(self, graph: AutogradGraph, min_flops: float) -> None:
        self._graph = graph
        self._min_flops = min_flops if rules_work() else float("inf")
        self._deferrable: dict[Node, bool] = {}

    def sources(self, node: Node) -> list[tuple[Node, int]] | None:
        """(operator, edge) pairs that lead to ``node``, directly or by views; None if any other operator does."""
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
