"""autograd's engine, entered without the checks of ``torch.autograd.backward`` and ``torch.autograd.grad``.

These check their arguments in Python, which takes about as long as running the graph of a small module. Callers here
pass gradients that have the shapes of their roots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.overrides import has_torch_function

#: Where backward enters the graph: an output, or its gradient edge.
Root = Tensor | GradientEdge

#: A private name of torch; without it, the public functions run.
_run_engine: Any = getattr(torch.autograd.graph, "_engine_run_backward", None)


def backward(roots: Sequence[Root], gradients: Sequence[Tensor]) -> None:
    """Add to ``.grad`` of all leaves. A root that occurs twice has the sum of its gradients."""
    entered: Any = tuple(roots)
    if not _is_direct(entered):
        torch.autograd.backward(entered, tuple(gradients))
        return
    _run_engine(entered, tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)


def grad(roots: Sequence[Root], gradients: Sequence[Tensor], inputs: Sequence[Root]) -> Sequence[Tensor | None]:
    """The gradient of each of ``inputs`` (at least one), None if none reaches it; no ``.grad`` changes."""
    entered: Any = tuple(roots)
    targets: Any = tuple(inputs)
    results: Sequence[Tensor | None]
    if _is_direct((*entered, *targets)):
        results = _run_engine(entered, tuple(gradients), False, False, targets, True, accumulate_grad=False)
    else:
        results = torch.autograd.grad(entered, targets, tuple(gradients), allow_unused=True)
    return results


def _is_direct(arguments: tuple[Any, ...]) -> bool:
    """Whether no mode and no tensor subclass wants to see the call of the public function."""
    return _run_engine is not None and not has_torch_function(arguments)
