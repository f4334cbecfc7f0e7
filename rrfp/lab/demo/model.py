"""The demo's model: a small byte-level GPT, cut into stages of ordinary torch modules.

It knows nothing of pipelines but "a list of modules, each of which reads the output of the one before". A layer's
weights depend on the seed and the layer's index alone, so every cut of the model is the same model. A layer is two
modules, attention and perceptron, so that a fine cut can go through it.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from rrfp.errors import ConfigError

#: Standard deviation of initial weights (GPT-2's).
INITIAL_SCALE = 0.02


@dataclass(frozen=True, slots=True)
class GptConfig:
    """The model's size."""

    #: Different tokens; the default is every byte.
    vocabulary: int = 256
    #: Longest sequence, tokens.
    sequence_length: int = 128
    #: Transformer blocks of the whole model.
    layers: int = 4
    #: Size of the residual stream.
    width: int = 96
    #: Attention heads of a block.
    heads: int = 4

    def __post_init__(self) -> None:
        for field in ("vocabulary", "sequence_length", "layers", "width", "heads"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{field} is {getattr(self, field)}, must be at least 1")
        if self.width % self.heads:
            raise ConfigError(f"width is {self.width}, must be a multiple of heads ({self.heads})")


def build_stages(config: GptConfig, num_stages: int, seed: int = 0) -> list[nn.Module]:
    """The whole model as ``num_stages`` modules: embedding in the first, final norm and head in the last.

    Each reads the output of the one before; the first reads tokens (batch x length, int64), the last returns logits
    (batch x length x vocabulary). torch's random state is left as it was. With more stages
    than layers, cuts go through layers.
    """
    if seed < 0:
        raise ConfigError(f"seed is {seed}, must be at least 0")
    most = 2 * config.layers
    if not 1 <= num_stages <= most:
        raise ConfigError(f"stages is {num_stages}, must be 1..{most} (the model has {config.layers} layers)")
    blocks: list[nn.Module] = []
    with torch.random.fork_rng(devices=[]):
        _seed_layer(seed, 0)
        embedding = Embedding(config)
        for index in range(config.layers):
            _seed_layer(seed, 1 + index)
            block = TransformerBlock(config)
            blocks += [block] if num_stages <= config.layers else block
        _seed_layer(seed, 1 + config.layers)
        head = Head(config)
    stages: list[list[nn.Module]] = [[] for _ in range(num_stages)]
    for index, part in enumerate(blocks):
        stages[index * num_stages // len(blocks)].append(part)
    stages[0].insert(0, embedding)
    stages[-1].append(head)
    return [nn.Sequential(*stage) for stage in stages]


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Embedding(nn.Module):
    """Tokens and their positions to vectors."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.sequence_length, config.width)
        _initialize(self)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        out: Tensor = self.tokens(tokens) + self.positions(positions)
        return out


class Attention(nn.Module):
    """Causal attention on normed vectors, added to them."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm = nn.LayerNorm(config.width)
        self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.query_key_value(self.norm(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = x + self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Perceptron(nn.Module):
    """A two-layer perceptron on normed vectors, added to them."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.layers = nn.Sequential(
            nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.layers(self.norm(x))
        return out


class TransformerBlock(nn.Sequential):
    """One transformer layer."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__(Attention(config), Perceptron(config))
        _initialize(self)


class Head(nn.Module):
    """Final norm, and vectors to logits."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.logits = nn.Linear(config.width, config.vocabulary, bias=False)
        _initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.logits(self.norm(x))
        return out


def _seed_layer(seed: int, layer: int) -> None:
    torch.manual_seed(int(np.random.SeedSequence([seed, layer]).generate_state(1, np.uint64)[0]))


def _initialize(layer: nn.Module) -> None:
    for module in layer.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=INITIAL_SCALE)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
