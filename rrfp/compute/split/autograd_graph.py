"""The autograd graph of one forward pass, as a split backward needs it, and autograd's engine, which runs it.

It reads public attributes of graph nodes (`next_functions`, `name`, `variable`) and their hooks, and knows no formulas.
The engine is entered without the checks of ``torch.autograd.backward`` and ``torch.autograd.grad``: these are made in
Python, which takes about as long as running the graph of a small module, and callers here pass gradients that have the
shapes of their roots.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, register_multi_grad_hook
from torch.overrides import has_torch_function

#: Where backward enters the graph: an output, or its gradient edge.
Root = Tensor | GradientEdge

#: A private name of torch; without it, the public functions run.
_run_engine: Any = getattr(torch.autograd.graph, "_engine_run_backward", None)


def run_backward(roots: Sequence[Root], gradients: Sequence[Tensor]) -> None:
    """Add to ``.grad`` of all leaves; a root may occur twice."""
    entered: Any = tuple(roots)
    if not _is_direct(entered):
        torch.autograd.backward(entered, tuple(gradients))
        return
    _run_engine(entered, tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)


def run_grad(roots: Sequence[Root], gradients: Sequence[Tensor], inputs: Sequence[Root]) -> Sequence[Tensor | None]:
    """The gradient of each of ``inputs``, or None; no ``.grad`` changes."""
    entered: Any = tuple(roots)
    targets: Any = tuple(inputs)
    results: Sequence[Tensor | None]
    if _is_direct((*entered, *targets)):
        results = _run_engine(entered, tuple(gradients), False, False, targets, True, accumulate_grad=False)
    else:
        results = torch.autograd.grad(entered, targets, tuple(gradients), allow_unused=True)
    return results


def _is_direct(arguments: tuple[Any, ...]) -> bool:
    """Whether no mode and no subclass wants to see the public call."""
    return _run_engine is not None and not has_torch_function(arguments)


#: A node of the graph. torch types them loosely: their attributes depend on the operator.
Node = Any

ACCUMULATE = "torch::autograd::AccumulateGrad"
#: The node of reentrant checkpointing, which runs a backward of its own and refuses `autograd.grad`.
REENTRANT_CHECKPOINT = "CheckpointFunctionBackward"
#: The node of torch.compile: one for a whole compiled region.
COMPILED = "CompiledFunctionBackward"


@dataclass(frozen=True, slots=True)
class AutogradGraph:
    """All nodes that a backward from some roots may visit."""

    #: By node the name of its operator, such as ``AddmmBackward0``.
    names: dict[Node, str]
    #: By node the edges that lead to it: the node that each starts from, and its position there.
    incoming: dict[Node, list[tuple[Node, int]]]
    roots: frozenset[Node]

    @classmethod
    def walk(cls, roots: Iterable[Node]) -> AutogradGraph:
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
        return [(node, node.variable) for node, name in self.names.items() if name == ACCUMULATE]

    def obstacle(self) -> str | None:
        """Why this graph cannot be split; None if it can."""
        names = set(self.names.values())
        if REENTRANT_CHECKPOINT in names:
            return "it uses reentrant checkpointing, which differentiates only as a whole (use_reentrant=False splits)"
        if any(name.startswith(COMPILED) for name in names):
            return "it is compiled by torch.compile, whose backward is one piece"
        if any(_counts_leaves(tensor) for _, tensor in self.leaves() if tensor._backward_hooks):
            return "a hook of several tensors (register_multi_grad_hook) counts a leaf, as only a whole backward allows"
        return None


def has_hooks(node: Node) -> bool:
    """Whether the node itself has Python hooks (``register_hook``, ``register_prehook``)."""
    # torch does not list the hooks of a node, but the handle of a further hook refers to all hooks of its kind.
    for register in (node.register_prehook, node.register_hook):
        handle = register(_nothing)
        hooks = handle.hooks_dict_ref()
        handle.remove()
        if hooks is None or hooks:
            return True
    return False


class OuterGradients:
    """Within, records the gradients that reach some nodes."""

    # Why not take the results of autograd.grad? For a node that it also runs, the engine reports the gradient before
    # the prehooks of that node. So each node gets a last prehook. The engine calls no hooks of a node that it does not
    # run; for such a node its result is right.

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._nodes = tuple(nodes)
        self._handles: list[Any] = []
        self.by_node: dict[Node, Tensor | None] = {}

    def __enter__(self) -> OuterGradients:
        self._handles = [node.register_prehook(partial(self._record, node)) for node in self._nodes]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _record(self, node: Node, gradients: tuple[Tensor | None, ...]) -> None:
        (self.by_node[node],) = gradients


def _counts_leaves(leaf: Tensor) -> bool:
    """Whether a leaf's hook refuses to run in ``autograd.grad``."""
    hooks = leaf._backward_hooks.values() if leaf._backward_hooks else ()
    return any(getattr(hook, "__module__", None) == register_multi_grad_hook.__module__ for hook in hooks)


def _nothing(*_: object) -> None:
    """A hook that changes nothing."""


def is_leaf(node: Node) -> bool:
    """Whether the node accumulates the gradient of a leaf."""
    return bool(node.name() == ACCUMULATE)
