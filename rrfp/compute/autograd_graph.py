"""The autograd graph of one forward pass, as far as a split backward has to know it.

Reads public attributes of graph nodes (`next_functions`, `name`, `variable`); knows no formulas.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

#: A node of the graph. torch types them loosely: their attributes depend on the operator.
Node = Any

_ACCUMULATE = "torch::autograd::AccumulateGrad"
#: What reentrant checkpointing puts into the graph: it runs a backward of its own and allows no other.
REENTRANT_CHECKPOINT = "CheckpointFunctionBackward"
#: What torch.compile puts there: one node for a whole compiled region.
COMPILED = "CompiledFunctionBackward"


@dataclass(frozen=True, slots=True)
class AutogradGraph:
    """All nodes that a backward from some roots may visit.

    Attributes:
        names: every node and its operator's name, such as ``AddmmBackward0``.
        incoming: for each node that another one leads to, those nodes and the position of the edge in them.
        roots: where backward enters.
    """

    names: dict[Node, str]
    incoming: dict[Node, list[tuple[Node, int]]]
    roots: frozenset[Node]

    @classmethod
    def walk(cls, roots: Iterable[Node]) -> AutogradGraph:
        """Visit everything that ``roots`` lead to."""
        entered = frozenset(roots)
        names: dict[Node, str] = {node: node.name() for node in entered}
        incoming: dict[Node, list[tuple[Node, int]]] = {}
        stack = list(entered)
        while stack:
            node = stack.pop()
            for position, (following, _) in enumerate(node.next_functions):
                if following is None:
                    continue
                incoming.setdefault(following, []).append((node, position))
                if following not in names:
                    names[following] = following.name()
                    stack.append(following)
        return cls(names, incoming, entered)

    def leaves(self) -> list[tuple[Node, Tensor]]:
        """Every leaf that gradients reach: its node and the tensor."""
        return [(node, node.variable) for node, name in self.names.items() if name == _ACCUMULATE]

    def obstacle(self) -> str | None:
        """Why this graph has to be differentiated in one go, or None."""
        names = self.names.values()
        if REENTRANT_CHECKPOINT in names:
            return "it uses reentrant checkpointing, which differentiates only as a whole (use_reentrant=False splits)"
        if any(name.startswith(COMPILED) for name in names):
            return "it is compiled by torch.compile, whose backward is one piece"
        return None


def is_leaf(node: Node) -> bool:
    """Whether gradients end here, at a leaf tensor."""
    return bool(node.name() == _ACCUMULATE)
