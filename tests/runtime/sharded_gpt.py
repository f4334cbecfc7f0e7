"""Tiny models cut into virtual stages: the same weights whole, or sharded over a mesh dim by torch's own styles."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

WIDTH, HEADS, VOCABULARY, LENGTH = 8, 4, 12, 6

Plan = dict[str, ParallelStyle]


class Layer(nn.Module):
    """Knows how it is sharded."""

    def plan(self) -> Plan:
        raise NotImplementedError


class Embedding(Layer):
    """Tokens and positions to vectors; the table is sharded by tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def plan(self) -> Plan:
        return {"tokens": RowwiseParallel(input_layouts=Replicate())}

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return x


class Block(Layer):
    """Attention and a perceptron, heads and hidden units sharded; dropout where activations are replicated."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.mixed = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def plan(self) -> Plan:
        columns: Plan = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
        return {**columns, "mixed": RowwiseParallel(), "down": RowwiseParallel()}

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        y: Tensor = x + self.dropout(self.down(nn.functional.gelu(self.up(self.mlp_norm(x)))))
        return y

    def attention(self, x: Tensor) -> Tensor:
        query, key, value = (
            product(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for product in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.mixed(mixed.transpose(1, 2).flatten(2))
        return out


class Head(Layer):
    """Vectors to logits, which every rank has whole."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.logits = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def plan(self) -> Plan:
        return {"logits": ColwiseParallel(output_layouts=Replicate())}

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.logits(self.norm(x))
        return out


class ShardedHead(Head):
    """Logits stay sharded, as torch's ``loss_parallel`` wants them: the loss is a DTensor."""

    def plan(self) -> Plan:
        return {"logits": ColwiseParallel(use_local_output=False)}


class Perceptron(Layer):
    """A sharded layer at either end: in and out go the bare tensors of collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def plan(self) -> Plan:
        return {"up": ColwiseParallel(), "down": RowwiseParallel()}

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(x)))
        return out


class SequenceEmbedding(Layer):
    """Each rank gets the vectors of its part of the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)

    def plan(self) -> Plan:
        return {"tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))}

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.tokens(tokens)
        return out


class SequencePerceptron(Perceptron):
    """Sharded by position but between its products (sequence parallelism), the norm included."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def plan(self) -> Plan:
        return {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(self.norm(x))


class SequenceHead(Head):
    """Gathers the positions."""

    def plan(self) -> Plan:
        return {
            "norm": SequenceParallel(),
            "logits": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }


#: First layer, the one between, last layer.
MODELS: dict[str, tuple[type[Layer], type[Layer], type[Layer]]] = {
    "gpt": (Embedding, Block, Head),
    "sharded loss": (Embedding, Block, ShardedHead),
    "bare": (Perceptron, Perceptron, Perceptron),
    "sequence": (SequenceEmbedding, SequencePerceptron, SequenceHead),
}


def build(model: str, count: int) -> list[nn.Module]:
    """A model as ``count`` virtual stages, each with a layer from the middle; in float64, always the same weights."""
    first, middle, last = MODELS[model]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [[middle()] for _ in range(count)]
        layers[0].insert(0, first())
        layers[-1].append(last())
        return [nn.Sequential(*stage).double() for stage in layers]


def shard(stage: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a virtual stage's layers, in place."""
    for layer in stage.modules():
        if isinstance(layer, Layer):
            parallelize_module(layer, mesh, layer.plan())


def whole(gradient: Tensor) -> Tensor:
    """All of a gradient. A collective where it is sharded."""
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def largest_difference(sharded: Sequence[nn.Module], expected: Sequence[nn.Module]) -> float:
    """Between gradients; infinite where one side has none. A collective."""
    worst = 0.0
    for left, right in zip(sharded, expected, strict=True):
        for ours, theirs in zip(left.parameters(), right.parameters(), strict=True):
            if ours.grad is None or theirs.grad is None:
                return float("inf")
            worst = max(worst, float((whole(ours.grad) - theirs.grad).abs().max()))
    return worst
