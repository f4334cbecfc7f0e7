"""The autograd graph of one forward pass, as far as a split backward has to know it.

Reads public attributes of graph nodes (`next_functions`, `name`, `variable`) and their hooks; knows no formulas.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook

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
        if any(_counts_leaves(tensor) for _, tensor in self.leaves()):
            return "a hook of several tensors (register_multi_grad_hook) counts a leaf, as only a whole backward allows"
        return None


def has_hooks(node: Node) -> bool:
    """Whether Python code hooked the node itself (``register_hook``, ``register_prehook``), not a tensor.

    torch tells nobody which hooks a node has, but the handle of a further hook refers to all of its kind.
    """
    for register in (node.register_prehook, node.register_hook):
        handle = register(_nothing)
        hooks = handle.hooks_dict_ref()
        handle.remove()
        if hooks is None or hooks:
            return True
    return False


class OuterGradients:
    """Within, takes the gradients that the engine gives to some nodes, after all hooks in front of them.

    Whom the engine is asked for the gradient of, it answers before the hooks of a node that it then runs. So each node
    gets a hook, which is its last. A node that the engine does not run calls no hooks; there its answer is right.

    Args:
        nodes: which; of one output each.

    Attributes:
        found: by node, if the engine ran it.
    """

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._nodes = tuple(nodes)
        self._handles: list[Any] = []
        self.found: dict[Node, Tensor | None] = {}

    def __enter__(self) -> OuterGradients:
        self._handles = [node.register_prehook(partial(self._take, node)) for node in self._nodes]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _take(self, node: Node, gradients: tuple[Tensor | None, ...]) -> None:
        (self.found[node],) = gradients


def _counts_leaves(leaf: Tensor) -> bool:
    """Whether a hook of several tensors is on this leaf: it refuses to run in ``autograd.grad``."""
    hooks = (leaf._backward_hooks or {}).values()
    return any(getattr(hook, "__module__", None) == register_multi_grad_hook.__module__ for hook in hooks)


def _nothing(*_: object) -> None:
    """A hook that changes nothing."""


def is_leaf(node: Node) -> bool:
    """Whether gradients end here, at a leaf tensor."""
    return bool(node.name() == _ACCUMULATE)
