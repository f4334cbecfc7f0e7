"""All stages of a pipeline in one process: for debugging, tests and notebooks.

    python examples/local.py

The gradients are compared with those of the same model without a pipeline.
"""

import torch
from torch import nn

import rrfp


def build() -> list[nn.Module]:
    """Three stages of a small network, in float64 so that the comparison is sharp."""
    torch.manual_seed(0)
    stages = [
        nn.Sequential(nn.Linear(16, 32), nn.Tanh()),
        nn.Sequential(nn.Linear(32, 32), nn.Tanh()),
        nn.Linear(32, 4),
    ]
    return [stage.double() for stage in stages]


def main() -> None:
    """Train a few steps, evaluate, compare."""
    stages = build()
    optimizer = torch.optim.SGD([p for stage in stages for p in stage.parameters()], lr=0.1)
    # Microbatches may differ in size; weighted by size, their mean is that of the whole batch.
    sizes = [5, 2, 7, 4, 6]
    inputs = [torch.randn(size, 16, dtype=torch.float64) for size in sizes]
    targets = [torch.randint(4, (size,)) for size in sizes]

    with rrfp.local(stages, hint="bf", limit="1f1b", loss_fn=nn.functional.cross_entropy) as pipe:
        for step in range(5):
            optimizer.zero_grad()
            result = pipe.step(inputs, targets, weights=sizes)
            print(f"step {step}: loss {result.loss:.4f}, microbatches held by stage {result.peak_held}")
            if step == 0:
                compare(stages, inputs, targets)
            optimizer.step()
        print(f"evaluate: loss {pipe.evaluate(inputs, targets, weights=sizes).loss:.4f}")


def compare(stages: list[nn.Module], inputs: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    """Print the largest difference from the gradients of an ordinary backward over the whole batch."""
    whole = nn.Sequential(*build())
    torch.autograd.backward(nn.functional.cross_entropy(whole(torch.cat(inputs)), torch.cat(targets)))
    pairs = zip((p for stage in stages for p in stage.parameters()), whole.parameters(), strict=True)
    worst = max(float((a.grad - b.grad).abs().max()) for a, b in pairs if a.grad is not None and b.grad is not None)
    print(f"        largest difference to the gradients without a pipeline: {worst:.1e}")


if __name__ == "__main__":
    main()
