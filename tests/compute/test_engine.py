"""The engine entered directly: what the public functions of torch compute, and where those must run instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from rrfp.compute.split import autograd_graph


def graph() -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    linear, x = nn.Linear(4, 3), torch.randn(5, 4, requires_grad=True)
    return linear, x, torch.tanh(linear(x))


@pytest.mark.parametrize("is_direct", [True, False])
def test_gradients_are_those_of_the_public_functions(is_direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    linear, x, output = graph()
    expected = torch.autograd.grad(output, (x, linear.weight), torch.ones(5, 3))
    if not is_direct:  # as in a torch without the private name
        monkeypatch.setattr(autograd_graph, "_run_engine", None)

    _, x, output = graph()
    found = autograd_graph.run_grad(
        [get_gradient_edge(output)], [torch.ones(5, 3)], [x, torch.ones(1, requires_grad=True)]
    )
    assert torch.equal(not_none(found[0]), expected[0])
    assert found[1] is None, "no gradient reaches it"
    assert x.grad is None

    linear, x, output = graph()
    autograd_graph.run_backward([output, output], [torch.ones(5, 3)] * 2)
    assert torch.equal(not_none(x.grad), 2 * expected[0])
    assert torch.equal(not_none(linear.weight.grad), 2 * expected[1])


def not_none(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def test_a_function_mode_of_the_caller_sees_the_public_functions() -> None:
    class Seen(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: set[str] = set()

        def __torch_function__(
            self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            self.names.add(func.__name__)
            return func(*args, **(kwargs or {}))

    (_, x, output), (_, _, other) = graph(), graph()
    with Seen() as seen:
        autograd_graph.run_grad([output], [torch.ones(5, 3)], [x])
        autograd_graph.run_backward([other], [torch.ones(5, 3)])
    assert {"grad", "backward"} <= seen.names
