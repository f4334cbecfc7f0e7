"""Two chunks of the model on each rank, in V placement: more choice in the same memory.

    python examples/two_chunks.py

Rank i of N holds the parts i and 2N - 1 - i of a model cut into 2N parts. The gradients, and so the losses, are those
of N parts on N ranks. It pays where times vary and tasks are long beside their overhead: docs/how-to/choose.md.
"""

from typing import Literal

import torch
from torch import nn

import rrfp

RANKS, WIDTH, MICROBATCHES = 2, 16, 6


def build(count: int) -> list[nn.Module]:
    """The same four layers in ``count`` parts."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    size = len(layers) // count
    return [nn.Sequential(*layers[first : first + size]).double() for first in range(0, len(layers), size)]


def train(name: str, ranks: list[list[nn.Module]], placement: Literal["looped", "v"]) -> None:
    """Train a few steps and print what the ranks held."""
    parameters = [parameter for chunks in ranks for chunk in chunks for parameter in chunk.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    batches = torch.randn(2, MICROBATCHES, 5, WIDTH, generator=torch.Generator().manual_seed(1)).double()
    inputs, targets = (list(batch) for batch in batches)
    loss_fn = nn.functional.mse_loss
    with rrfp.local(ranks, placement=placement, limit="n", split=True, loss_fn=loss_fn) as pipe:
        for _ in range(3):
            result = pipe.step(inputs, targets)
            optimizer.step()
            optimizer.zero_grad()
            print(f"{name}: loss {result.loss:.6f}, chunk tasks held by rank {result.peak_held}")


def main() -> None:
    """One chunk a rank, then two."""
    train("one chunk", [[part] for part in build(RANKS)], "looped")
    parts = build(2 * RANKS)
    train("V", [[parts[i], parts[2 * RANKS - 1 - i]] for i in range(RANKS)], "v")


if __name__ == "__main__":
    main()
