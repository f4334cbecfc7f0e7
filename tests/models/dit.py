"""DiT in two stages: time steps and classes travel with the activations, as every block embeds them.

The library computes the last modulation with the first block's embedding: that is tied between the stages.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import DiTTransformer2DModel
from models.case import Case, Microbatch, draw_floats, draw_integers, squared_error
from torch import Tensor, nn

CLASSES, SIZE, PATCH = 7, 8, 2


class First(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.patches, self.blocks = model.pos_embed, model.transformer_blocks[:1]

    def forward(self, images: Tensor, times: Tensor, classes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.patches(images)
        for block in self.blocks:
            hidden = block(hidden, timestep=times, class_labels=classes)
        return hidden, times, classes


class Last(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.blocks, self.condition = model.transformer_blocks[1:], model.transformer_blocks[0].norm1.emb
        self.modulation, self.norm, self.head = model.proj_out_1, model.norm_out, model.proj_out_2
        self.channels = model.out_channels

    def forward(self, hidden: Tensor, times: Tensor, classes: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden, timestep=times, class_labels=classes)
        condition = self.condition(times, classes, hidden_dtype=hidden.dtype)
        shift, scale = self.modulation(nn.functional.silu(condition))[:, None].chunk(2, dim=-1)
        pixels: Tensor = self.head(self.norm(hidden) * (1 + scale) + shift)
        side = SIZE // PATCH
        grid = pixels.reshape(-1, side, side, PATCH, PATCH, self.channels)
        return grid.permute(0, 5, 1, 3, 2, 4).reshape(-1, self.channels, SIZE, SIZE)


def build() -> nn.Module:
    model: Any = DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=3,
        num_layers=3,
        sample_size=SIZE,
        patch_size=PATCH,
        num_embeds_ada_norm=CLASSES,
        norm_num_groups=1,
    )
    for block in model.transformer_blocks:
        block.norm1.emb.class_embedder.dropout_prob = 0.0  # its random numbers would be others in the unsplit model
    result: nn.Module = model
    return result


def cut(model: Any) -> list[nn.Module]:
    return [First(model), Last(model)]


def draw(generator: torch.Generator, m: int) -> Microbatch:
    rows = 1 + m % 3
    images = draw_floats(generator, rows, 3, SIZE, SIZE)
    times, classes = draw_integers(generator, 1000, rows), draw_integers(generator, CLASSES, rows)
    return Microbatch(
        inputs=(images, times, classes),
        whole={"hidden_states": images, "timestep": times, "class_labels": classes},
        target=draw_floats(generator, rows, 3, SIZE, SIZE),
        weight=rows,
    )


def whole_loss(output: Any, target: Tensor) -> Tensor:
    return squared_error(output.sample, target)


CASE = Case(build=build, cut=cut, draw=draw, loss=squared_error, whole_loss=whole_loss)
