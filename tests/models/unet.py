"""diffusers' UNet2D in three stages: the tuple of skips travels from the way down to the way up."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import UNet2DModel
from models.case import Case, Microbatch, draw_floats, draw_integers, squared_error
from torch import Tensor, nn

#: Activations for the way up, in the order in which they were made.
Skips = tuple[Tensor, ...]


class Down(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.time, self.embedding, self.entry = model.time_proj, model.time_embedding, model.conv_in
        self.blocks = model.down_blocks[:2]

    def forward(self, images: Tensor, times: Tensor) -> tuple[Tensor, Tensor, Skips]:
        condition = self.embedding(self.time(times).to(images.dtype))
        hidden = self.entry(images)
        skips: Skips = (hidden,)
        for block in self.blocks:
            hidden, made = block(hidden, condition)
            skips += made
        return hidden, condition, skips


class Middle(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.down, self.middle, self.up = model.down_blocks[2], model.mid_block, model.up_blocks[0]

    def forward(self, hidden: Tensor, condition: Tensor, skips: Skips) -> tuple[Tensor, Tensor, Skips]:
        hidden, made = self.down(hidden, condition)
        hidden = self.middle(hidden, condition)
        hidden, rest = climb(self.up, hidden, condition, (*skips, *made))
        return hidden, condition, rest


class Up(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.blocks = model.up_blocks[1:]
        self.exit = nn.Sequential(model.conv_norm_out, model.conv_act, model.conv_out)

    def forward(self, hidden: Tensor, condition: Tensor, skips: Skips) -> Tensor:
        for block in self.blocks:
            hidden, skips = climb(block, hidden, condition, skips)
        output: Tensor = self.exit(hidden)
        return output


def climb(block: Any, hidden: Tensor, condition: Tensor, skips: Skips) -> tuple[Tensor, Skips]:
    """Run a block of the way up, which takes the last skips; returns the others with its output."""
    taken = len(block.resnets)
    return block(hidden, skips[-taken:], condition), skips[:-taken]


def build() -> nn.Module:
    model: nn.Module = UNet2DModel(
        sample_size=8,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(8, 8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
        norm_num_groups=4,
        dropout=0.0,
    )
    return model


def cut(model: Any) -> list[nn.Module]:
    return [Down(model), Middle(model), Up(model)]


def draw(generator: torch.Generator, m: int) -> Microbatch:
    """Images of two sizes."""
    rows, size = 1 + m % 3, 8 + 4 * (m % 2)
    images, times = draw_floats(generator, rows, 3, size, size), draw_integers(generator, 1000, rows)
    return Microbatch(
        inputs=(images, times),
        whole={"sample": images, "timestep": times},
        target=draw_floats(generator, rows, 3, size, size),
        weight=rows * size * size,
    )


def whole_loss(output: Any, target: Tensor) -> Tensor:
    return squared_error(output.sample, target)


CASE = Case(build=build, cut=cut, draw=draw, loss=squared_error, whole_loss=whole_loss)
