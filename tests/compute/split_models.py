"""Modules whose backward is split, from a single layer to those that a split is hard for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Twice(nn.Module):
    """One linear layer used twice, with something between."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.tanh(self.linear(x)))  # type: ignore[no-any-return]


class Tied(nn.Module):
    """The head is the embedding's table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.body = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.body(self.table(_integers(x))), self.table.weight)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.attention(x, x, x)[0]
        return mixed


class SelfMade(nn.Module):
    """Parameters in places where no rule looks: left of a product, in an addition, scaled, and as the whole output."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.randn(6, 6))
        self.shift = nn.Parameter(torch.randn(8))
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (self.left @ x.reshape(6, 8)) @ (2 * self.weight) + self.shift, self.shift


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 8))
        self.outer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(checkpoint(self.inner, x, use_reentrant=False))  # type: ignore[no-any-return]


class LowPrecision(nn.Module):
    """Under autocast one cast copy of the weight serves both uses."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = Twice()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.twice(x)  # type: ignore[no-any-return]


class Sum(nn.Module):
    """The gradient of both parameters, and of the input, is one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(2, 3, 8)), nn.Parameter(torch.randn(2, 3, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.left + self.right)


class ManyUses(nn.Module):
    """A weight used as it is and through views: more than two terms, whose order decides the bits of their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        looked = self.table(_integers(x) % 8).mean(-1) + x
        looked = functional.linear(looked, self.table.weight)
        return functional.linear(looked + self.table(_integers(x + 1) % 8).mean(-1), self.table.weight)


class Views(nn.Module):
    """Outputs are views of one product."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.linear(x).chunk(3, dim=-1)  # type: ignore[no-any-return]


def _integers(x: Tensor) -> Tensor:
    return (x * 7).long().abs() % 11


def _frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    module[1].weight.requires_grad_(False)
    module[0].bias.requires_grad_(False)
    return module


#: Name: (module, how many operators are deferred; None: any number).
MODULES: dict[str, tuple[Callable[[], nn.Module], int | None]] = {
    "linear": (lambda: nn.Linear(8, 5), 1),
    "linear without bias": (lambda: nn.Linear(8, 5, bias=False), 1),
    "a stack": (lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 8)), 2),
    "dropout": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 8)), 2),
    "one layer twice": (Twice, 2),
    "tied": (Tied, 3),
    "frozen": (_frozen, 2),
    "attention": (Attention, None),
    "self-made": (SelfMade, 0),
    "checkpointed": (Checkpointed, 1),
    "low precision": (LowPrecision, 2),
    "views": (Views, 1),
    "one gradient for two parameters": (Sum, 0),
    "many uses": (ManyUses, 0),
    "sparse": (lambda: _Indices(nn.Embedding(11, 8, sparse=True)), 1),
    "sparse bag": (lambda: _Indices(nn.EmbeddingBag(11, 8, sparse=True)), 1),
    "convolution": (lambda: nn.Sequential(nn.Conv1d(3, 4, 3), nn.Conv1d(4, 2, 2, bias=False)), 2),
    "transposed": (lambda: nn.ConvTranspose1d(3, 4, 3, groups=1), 1),
    "recurrent": (lambda: nn.Sequential(nn.GRU(8, 8), _First()), None),
    "transformer layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), None),
    "no parameters": (nn.ReLU, 0),
}


class _Indices(nn.Module):
    """A sparse table, and a layer behind it."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table, self.linear = table, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x[0] * self.linear(self.table(_integers(x[0]))).mean()  # type: ignore[no-any-return]


class _First(nn.Module):
    def forward(self, pair: Any) -> Tensor:
        first: Tensor = pair[0]
        return first
