"""Models whose embedding is their head's weight too: as one parameter object, or as a copy for each stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rrfp.testing.reference import ReferenceResult, reference

WORDS, WIDTH = 20, 16


class Head(nn.Module):
    """Uses its weight twice: scores for words, and the words' mean by their scores."""

    def __init__(self, weight: nn.Parameter, is_used: bool = True) -> None:
        super().__init__()
        self.weight = weight
        self.is_used = is_used

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_used:
            return x
        scores = torch.softmax(x @ self.weight.T, -1)
        return x + scores @ self.weight


def tied(
    count: int, heads: Sequence[int] = (), *, objects: bool = False, dtype: torch.dtype = torch.float64
) -> tuple[list[nn.Module], list[nn.Parameter]]:
    """A model of ``count`` parts. The embedding of the first is the weight of ``heads`` (the last) too.

    Returns:
        The parts; and the embedding's and the heads' weights: one object, or copies.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        embedding = nn.Embedding(WORDS, WIDTH).to(dtype)
        parts: list[nn.Module] = [
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2)).to(dtype) for _ in range(count)
        ]
    first = nn.Parameter(embedding.weight.detach())
    embedding.weight = first
    weights = [first]
    for v in heads or range(count)[-1:]:
        weights.append(first if objects else nn.Parameter(first.detach().clone()))
        parts[v] = nn.Sequential(parts[v], Head(weights[-1]))
    parts[0] = nn.Sequential(embedding, parts[0])
    return parts, weights


def words(microbatches: int, seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """Ragged microbatches and what they should become."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [2 + (3 * m + seed) % 4 for m in range(microbatches)]
    inputs = [torch.randint(0, WORDS, (length,), generator=generator) for length in lengths]
    targets = [torch.randn(length, WIDTH, dtype=torch.float64, generator=generator) for length in lengths]
    return inputs, targets


def expect(modules: Sequence[nn.Module], microbatches: int, number: int, **options: Any) -> ReferenceResult:
    """One step of the reference, whose modules share one object."""
    return reference(modules, *words(microbatches, number), loss_fn=nn.functional.mse_loss, step=number, **options)


def gradients(modules: Sequence[nn.Module]) -> list[Tensor | None]:
    """Of all parameters, a shared one once a module."""
    return [parameter.grad for module in modules for parameter in module.parameters()]


def same_bits(ours: Sequence[nn.Module], theirs: Sequence[nn.Module]) -> bool:
    """Whether all gradients are equal to the last bit."""
    pairs = list(zip(gradients(ours), gradients(theirs), strict=True))
    assert pairs
    return all(a is b is None or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


def gap(ours: Sequence[nn.Module], theirs: Sequence[nn.Module]) -> float:
    """The largest difference between gradients."""
    pairs = list(zip(gradients(ours), gradients(theirs), strict=True))
    assert pairs
    assert all(a is not None and b is not None for a, b in pairs)
    return max((a - b).abs().max().item() for a, b in pairs if a is not None and b is not None)
