"""Small models of several parts, in float64, whose step one process can check."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import rrfp

WIDTH = 4
MICROBATCHES = 4

#: Modules by part.
Modules = dict[str, list[nn.Module]]


class Block(nn.Module):
    """Adds up what it reads and transforms it; a sum of several readers' gradients depends on their order."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, WIDTH)

    def forward(self, x: Tensor | None = None, **read: Tensor | None) -> Tensor:
        value = torch.cos(self.linear.bias) if x is None else torch.tanh(self.linear(x))
        for number, name in enumerate(sorted(read)):
            if (tensor := read[name]) is not None:
                value = value + torch.sin(tensor * (number + 1.1)) * self.linear.bias
        return value


class Down(nn.Module):
    """One level down of a U-Net: an output for the next level, one for the way up, and one that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor | dict[str, Tensor]) -> dict[str, Tensor]:
        value = self.block(x)
        return {"unread": value * 3.0, "skip": value * 2.0, "deeper": torch.sigmoid(value)}


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


@dataclass(frozen=True)
class Model:
    """A graph with its modules and one batch.

    Attributes:
        graph: the graph.
        modules: by part.
        inputs: by part.
        targets: by microbatch; by part where several have losses.
        loss_fn: by part where several have losses.
        visits: of its optional parts.
        fewest: the smallest limit on microbatches that admits each one.
    """

    graph: rrfp.Graph
    modules: Modules
    inputs: Mapping[str, Sequence[Any]]
    visits: Mapping[str, Sequence[bool]] | None = None
    targets: Any = field(default_factory=lambda: tensors(WIDTH))
    loss_fn: Any = loss_fn

    @property
    def stages(self) -> int:
        return 1 + max(stage for part in self.graph.parts.values() for stage in part.stages)

    def of_stage(self, stage: int) -> dict[str, list[nn.Module]]:
        """The modules of ``stage`` as `rrfp.Pipeline` takes them."""
        own = {
            name: [m for m, at in zip(self.modules[name], part.stages, strict=True) if at == stage]
            for name, part in self.graph.parts.items()
        }
        return {name: modules for name, modules in own.items() if modules}

    def by_stage(self) -> list[dict[str, list[nn.Module]]]:
        """The modules as `rrfp.local` takes them."""
        return [self.of_stage(stage) for stage in range(self.stages)]

    def copied(self) -> Model:
        """The same with copies of the modules."""
        return Model(self.graph, copy.deepcopy(self.modules), self.inputs, self.visits, self.targets, self.loss_fn)

    def gradients(self) -> dict[str, Tensor | None]:
        """By the name of the parameter."""
        return {
            f"{name}.{index}.{parameter}": tensor.grad
            for name, own in self.modules.items()
            for index, module in enumerate(own)
            for parameter, tensor in module.named_parameters()
        }


def tensors(width: int, rows: Sequence[int] = (3,) * MICROBATCHES) -> list[Tensor]:
    return [torch.randn(count, width) for count in rows]


def blocks(count: int) -> list[nn.Module]:
    return [Block() for _ in range(count)]


def two_sources() -> Model:
    graph = rrfp.Graph()
    vision = graph.part("vision", stages=[0, 1], optional=True)
    audio = graph.part("audio", stages=[2], optional=True)
    graph.part("lm", stages=[3, 4], reads={"image": vision, "sound": audio})
    modules: Modules = {"vision": blocks(2), "audio": blocks(1), "lm": blocks(2)}
    visits = {"vision": [True, False, True, False], "audio": [True, True, False, False]}
    inputs = {name: tensors(WIDTH) for name in modules}
    return Model(graph, modules, inputs, visits)


def diamond() -> Model:
    """Three readers of one output, whose gradients are summed."""
    graph = rrfp.Graph()
    root = graph.part("root", stages=[0])
    sides = {name: graph.part(name, stages=[at], reads={"x": root}) for name, at in (("left", 1), ("right", 2))}
    graph.part("end", stages=[3], reads={**sides, "root": root})
    modules: Modules = {name: blocks(1) for name in graph.parts}
    return Model(graph, modules, {"root": tensors(WIDTH)})


def encoder_decoder() -> Model:
    graph = rrfp.Graph()
    encoder = graph.part("encoder", stages=[0, 1])
    graph.part("decoder", stages=[2, 3, 1], reads_all={"memory": encoder})
    modules: Modules = {"encoder": blocks(2), "decoder": blocks(3)}
    return Model(graph, modules, {name: tensors(WIDTH) for name in modules})


def unet() -> Model:
    graph = rrfp.Graph()
    first = graph.part("down1", stages=[0])
    second = graph.part("down2", stages=[1], reads={"x": first["deeper"]})
    middle = graph.part("middle", stages=[2], reads={"x": second["deeper"]})
    up = graph.part("up2", stages=[1], reads={"x": middle, "skip": second["skip"]})
    graph.part("up1", stages=[0], reads={"x": up, "skip": first["skip"], "again": first["deeper"]})
    modules: Modules = {"down1": [Down()], "down2": [Down()], "middle": blocks(1), "up2": blocks(1), "up1": blocks(1)}
    return Model(graph, modules, {"down1": tensors(WIDTH, (3, 2, 5, 1))}, targets=tensors(WIDTH, (3, 2, 5, 1)))


def colocated() -> Model:
    """A chunk of both encoders and of the language model on each of two stages."""
    graph = rrfp.Graph()
    vision = graph.part("vision", stages=[0, 1], optional=True)
    audio = graph.part("audio", stages=[0, 1], optional=True)
    graph.part("lm", stages=[0, 1], reads={"image": vision, "sound": audio})
    modules: Modules = {name: blocks(2) for name in graph.parts}
    visits = {"vision": [True, True, False, False], "audio": [False, True, False, True]}
    return Model(graph, modules, {name: tensors(WIDTH) for name in modules}, visits)


def chained_encoders() -> Model:
    """An optional part in the middle with an edge round it, and one that is skipped with its reader."""
    graph = rrfp.Graph()
    root = graph.part("root", stages=[0])
    tower = graph.part("tower", stages=[1], optional=True)
    projector = graph.part("projector", stages=[1], reads={"x": tower, "root": root}, optional=True)
    graph.part("lm", stages=[2, 0], reads={"image": projector, "x": root})
    modules: Modules = {"root": blocks(1), "tower": blocks(1), "projector": blocks(1), "lm": blocks(2)}
    visits = {"tower": [True, False, False, True], "projector": [True, False, True, True]}
    return Model(graph, modules, {name: tensors(WIDTH) for name in ("root", "tower")}, visits)


def several_losses() -> Model:
    """Three parts with losses of their own, on every stage one; two of them are skipped by some microbatches."""
    graph = rrfp.Graph()
    encoder = graph.part("encoder", stages=[0])
    lm = graph.part("lm", stages=[1, 2], reads={"image": encoder})
    graph.part("tags", stages=[0], reads={"x": encoder}, optional=True)
    graph.part("caption", stages=[1], reads={"x": lm, "image": encoder})
    graph.part("order", stages=[2], reads={"x": lm}, optional=True)
    modules: Modules = {name: blocks(len(part.stages)) for name, part in graph.parts.items()}
    visits = {"tags": [True, False, True, False], "order": [False, False, True, True]}
    losses = {
        "tags": loss_fn,
        "caption": nn.SmoothL1Loss(),
        "order": lambda output, target: loss_fn(output, target) * 3,
    }
    targets = {name: tensors(WIDTH) for name in losses}
    return Model(graph, modules, {name: tensors(WIDTH) for name in ("encoder", "lm")}, visits, targets, losses)


MODELS: Mapping[str, Callable[[], Model]] = {
    each.__name__: each
    for each in (two_sources, diamond, encoder_decoder, unet, colocated, chained_encoders, several_losses)
}


def model(name: str) -> Model:
    """The model ``name``, always with the same parameters and batch, in float64."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(20261123)
            return MODELS[name]()
    finally:
        torch.set_default_dtype(default)
