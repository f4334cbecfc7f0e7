"""Ways to run a backward, on a stack of GPT blocks or of linear layers; shared by the benchmark and its processes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.nn import functional

from rrfp.compute.split.backward import MIN_FLOPS, input_gradients

SEQUENCE, BLOCKS, HEADS = 256, 4, 8
#: Linear layers of the stack that tells what deferring one costs.
LAYERS = 16

ORDINARY = "ordinary"

Weight = Callable[[], None]
#: Runs B for (module, input, output, gradient of the output); returns W.
Backward = Callable[[nn.Module, Tensor, Tensor, Tensor], Weight]


class Block(nn.Module):
    """A GPT block."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.mix, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.wide, self.narrow = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """One block."""
        batch, length, hidden = x.shape
        mixed = self.mix(self.first(x)).view(batch, length, 3, HEADS, hidden // HEADS).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(mixed[0], mixed[1], mixed[2], is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, hidden))
        result: Tensor = x + self.narrow(functional.gelu(self.wide(self.second(x))))
        return result


def blocks(hidden: int) -> nn.Module:
    """The model."""
    torch.manual_seed(0)
    return nn.Sequential(*[Block(hidden) for _ in range(BLOCKS)])


def layers(hidden: int) -> nn.Module:
    """Nothing but linear layers."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(hidden, hidden) for _ in range(LAYERS)])


def microbatch(hidden: int) -> tuple[Tensor, Tensor]:
    """One sequence, and the gradient of its output."""
    torch.manual_seed(1)
    return torch.randn(1, SEQUENCE, hidden), torch.randn(1, SEQUENCE, hidden)


def ideal_bytes(hidden: int) -> int:
    """What W of the model cannot do without: inputs and output gradients of four linear layers a block, float32."""
    inputs, gradients = hidden * (1 + 1 + 1 + 4), hidden * (3 + 1 + 4 + 1)
    return BLOCKS * SEQUENCE * (inputs + gradients) * 4


def ordinary(module: nn.Module, x: Tensor, output: Tensor, gradient: Tensor) -> Weight:
    """One backward."""
    torch.autograd.backward(output, gradient)
    return _nothing


def deferring(min_flops: float) -> Backward:
    """RRFP's, which defers weight gradients of so many operations and more."""

    def backward(module: nn.Module, x: Tensor, output: Tensor, gradient: Tensor) -> Weight:
        edge = get_gradient_edge(output)
        _, pending = input_gradients([edge], [gradient], [x], min_flops=min_flops)
        return pending.add_to_gradients

    return backward


def torchs(module: nn.Module, x: Tensor, output: Tensor, gradient: Tensor) -> Weight:
    """torch.distributed.pipelining's."""
    parameters: Any = module.parameters
    _, groups = stage_backward_input([output], [gradient], [x], parameters())

    def weight() -> None:
        stage_backward_weight(parameters(), groups)

    return weight


def _nothing() -> None:
    """Nothing is left for W."""


WAYS: dict[str, Backward] = {
    ORDINARY: ordinary,
    "rrfp": deferring(MIN_FLOPS),
    "rrfp, all deferred": deferring(0),
    "rrfp, none deferred": deferring(math.inf),
    "torch pipelining": torchs,
}


def timed(way: str, module: nn.Module, x: Tensor, gradient: Tensor) -> tuple[float, float, float]:
    """CPU seconds of F, B and W."""
    leaf = x.detach().requires_grad_()
    times = [time.thread_time()]
    output = module(leaf)
    times.append(time.thread_time())
    weight = WAYS[way](module, leaf, output, gradient)
    times.append(time.thread_time())
    weight()
    times.append(time.thread_time())
    module.zero_grad(set_to_none=True)
    return times[1] - times[0], times[2] - times[1], times[3] - times[2]
