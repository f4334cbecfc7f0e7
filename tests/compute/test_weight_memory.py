"""What waits for W is the inputs of layers and the gradients of their outputs, and at most a tenth beside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rrfp.compute.split.backward import input_gradients
from rrfp.lab.demo.model import GptConfig, TransformerBlock

WIDTH, ROWS = 128, 256

MODULES: dict[str, Callable[[], nn.Module]] = {
    "GPT blocks": lambda: nn.Sequential(
        *[TransformerBlock(GptConfig(width=WIDTH, sequence_length=ROWS)) for _ in range(2)]
    ),
    "multi-head attention": lambda: nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True),
    "layers in a row": lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)]),
    "convolutions": lambda: nn.Sequential(nn.Conv1d(ROWS, 64, 3), nn.ReLU(), nn.Conv1d(64, ROWS, 3, padding=2)),
}


def bytes_of_layers(module: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    """What ``module`` returns, and the bytes of inputs and outputs of all its layers."""
    total = 0

    def count(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal total
        total += (inputs[0].numel() + output.numel()) * output.element_size()

    layers = [one for one in module.modules() if isinstance(one, nn.Linear | nn.Conv1d)]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    output: Any = module(x)
    for hook in hooks:
        hook.remove()
    return output, total


@pytest.mark.parametrize("name", MODULES)
def test_what_waits_for_w_is_at_most_a_tenth_more_than_inputs_and_output_gradients(name: str) -> None:
    torch.manual_seed(0)
    module, x = MODULES[name](), torch.randn(1, ROWS, WIDTH, requires_grad=True)
    output, ideal = bytes_of_layers(module, x)
    if name == "multi-head attention":  # its projections run outside of modules: input to 3 parts, and one back
        ideal += ROWS * WIDTH * 4 * (1 + 3 + 1 + 1)
    _, pending = input_gradients([output], [torch.ones_like(output)], [x], min_flops=0)
    assert 0.9 * ideal <= pending.num_bytes <= 1.1 * ideal
    assert all(parameter.grad is None for parameter in module.parameters())
    pending.add_to_gradients()
    assert all(parameter.grad is not None for parameter in module.parameters())
