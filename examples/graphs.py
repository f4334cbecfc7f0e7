"""Two models whose parts form a graph, and the gradients of each beside those of the plain loop in one process.

    python examples/graphs.py --model encoder-decoder
    python examples/graphs.py --model unet

Encoder-decoder: every stage of the decoder reads the encoder's output, which travels to each of them directly. U-Net:
each part that scales up reads one value of what the part that scales down puts out; the other goes to the next part.
"""

import argparse
import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import rrfp

WIDTH, WORDS, MICROBATCHES = 16, 10, 6


@dataclass
class Model:
    """A model cut into parts, and all that it needs to train.

    Attributes:
        graph: its parts.
        modules: for each stage its modules by part.
        whole: its forward in one process, from all modules in the order of ``modules``, and a microbatch's inputs.
        loss_fn: of its output and the targets.
        draw: makes the inputs of a microbatch by part, and its targets.
        lr: for Adam.
    """

    graph: rrfp.Graph
    modules: list[dict[str, nn.Module]]
    whole: Callable[[Iterable[nn.Module], dict[str, Tensor]], Tensor]
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    draw: Callable[[torch.Generator], tuple[dict[str, Tensor], Tensor]]
    lr: float


class Embedding(nn.Module):
    """Words and positions to vectors, then a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.words, self.positions, self.layer = nn.Embedding(WORDS, WIDTH), nn.Embedding(16, WIDTH), layer

    def forward(self, words: Tensor, **others: Tensor) -> Tensor:
        x: Tensor = self.layer(self.words(words) + self.positions(torch.arange(words.shape[1])), **others)
        return x


class Head(nn.Module):
    """A layer, then vectors to words."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.words = layer, nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor, **others: Tensor) -> Tensor:
        y: Tensor = self.words(self.layer(x, **others))
        return y


def encoder_decoder() -> Model:
    """A transformer that learns to reverse a row of digits."""
    how: Any = {"dropout": 0.0, "batch_first": True, "norm_first": True}
    encoders, decoders = (
        [layer(WIDTH, 2, 4 * WIDTH, **how) for _ in range(2)]
        for layer in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    )
    graph = rrfp.Graph()
    encoder = graph.part("encoder", stages=[0, 1])
    graph.part("decoder", stages=[2, 3], reads_all={"memory": encoder})
    modules: list[dict[str, nn.Module]] = [
        {"encoder": Embedding(encoders[0])},
        {"encoder": encoders[1]},
        {"decoder": Embedding(decoders[0])},
        {"decoder": Head(decoders[1])},
    ]

    def whole(modules: Iterable[nn.Module], inputs: dict[str, Tensor]) -> Tensor:
        first, second, third, fourth = modules
        memory = second(first(inputs["encoder"]))
        x: Tensor = fourth(third(inputs["decoder"], memory=memory), memory=memory)
        return x

    def draw(generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        length = int(torch.randint(4, 9, (), generator=generator))
        digits = torch.randint(WORDS, (8, length), generator=generator)
        # The decoder sees no mask and no digit of the answer: it gets all it knows from the encoder.
        return {"encoder": digits, "decoder": torch.zeros_like(digits)}, digits.flip(1)

    def loss_fn(logits: Tensor, digits: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), digits.flatten())

    return Model(graph, modules, whole, loss_fn, draw, lr=1e-2)


class Down(nn.Module):
    """Features of pictures for the way up, and the same at half the size for the next part."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.features = nn.Conv2d(before, after, 3, padding=1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = torch.tanh(self.features(x))
        return {"skip": features, "down": nn.functional.avg_pool2d(features, 2)}


class Up(nn.Module):
    """Pictures at twice the size, with the features that had that size on the way down."""

    def __init__(self, before: int, skipped: int, after: int) -> None:
        super().__init__()
        self.features = nn.Conv2d(before + skipped, after, 3, padding=1)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        y: Tensor = self.features(torch.cat((nn.functional.interpolate(x, scale_factor=2), skip), 1))
        return y


def unet() -> Model:
    """A U-Net that learns to remove noise from stripes."""
    graph = rrfp.Graph()
    high = graph.part("high", stages=[0])
    low = graph.part("low", stages=[1], reads={"x": high["down"]})
    bottom = graph.part("bottom", stages=[2], reads={"input": low["down"]})
    up = graph.part("up", stages=[3], reads={"x": bottom, "skip": low["skip"]})
    # Back on stage 0: the features of full size, the largest tensors, stay where they are.
    graph.part("out", stages=[0], reads={"x": up, "skip": high["skip"]})
    modules: list[dict[str, nn.Module]] = [
        {"high": Down(1, 4), "out": Up(8, 4, 1)},
        {"low": Down(4, 8)},
        {"bottom": nn.Conv2d(8, 8, 3, padding=1)},
        {"up": Up(8, 8, 8)},
    ]

    def whole(modules: Iterable[nn.Module], inputs: dict[str, Tensor]) -> Tensor:
        high, out, low, bottom, up = modules
        large = high(inputs["high"])
        small = low(large["down"])
        y: Tensor = out(up(bottom(small["down"]), small["skip"]), large["skip"])
        return y

    def draw(generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        height, width = (4 * int(half) for half in torch.randint(2, 6, (2,), generator=generator))
        clean = (torch.arange(width) // 2 % 2 * 2.0 - 1).expand(4, 1, height, width)
        return {"high": clean + torch.randn(clean.shape, generator=generator)}, clean

    return Model(graph, modules, whole, nn.functional.mse_loss, draw, lr=1e-2)


def difference(model: Model, modules: nn.Module, inputs: list[dict[str, Tensor]], targets: list[Tensor]) -> float:
    """The largest one between the gradients of ``modules`` and those of the plain loop over the microbatches."""
    plain = copy.deepcopy(modules)
    plain.zero_grad()
    for own, target in zip(inputs, targets, strict=True):
        torch.autograd.backward(model.loss_fn(model.whole(plain.children(), own), target) / len(inputs))
    ours, theirs = (
        torch.cat([parameter.grad.flatten() for parameter in each.parameters() if parameter.grad is not None])
        for each in (modules, plain)
    )
    return float((ours - theirs).abs().max())


def main() -> None:
    """Train a few steps; compare the gradients of each with the plain loop's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = {"encoder-decoder": encoder_decoder, "unet": unet}
    parser.add_argument("--model", default="encoder-decoder", choices=list(models))
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model, generator = models[args.model](), torch.Generator().manual_seed(1)
    modules = nn.ModuleList(module for stage in model.modules for module in stage.values())
    optimizer = torch.optim.Adam(modules.parameters(), lr=model.lr)
    with rrfp.local(model.modules, graph=model.graph, loss_fn=model.loss_fn) as pipe:
        for step in range(1, args.steps + 1):
            batch = [model.draw(generator) for _ in range(MICROBATCHES)]
            inputs, targets = [own for own, _ in batch], [target for _, target in batch]
            by_part = {part: [own[part] for own in inputs] for part in inputs[0]}
            optimizer.zero_grad()
            result = pipe.step(by_part, targets)
            if step <= 3 or step % 10 == 0:
                worst = difference(model, modules, inputs, targets)
                print(f"step {step:3d}: loss {result.loss:.4f}, largest difference to the plain loop {worst:.1e}")
            optimizer.step()


if __name__ == "__main__":
    main()
