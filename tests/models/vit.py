"""ViT for image classification in three stages."""

from __future__ import annotations

from typing import Any

import torch
from models.case import Case, Microbatch, draw_floats, draw_integers, own_loss
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification

CLASSES = 5


class Layers(nn.Sequential):
    """Some layers."""

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self:
            hidden = layer(hidden, None)
        return hidden


class ClassToken(nn.Module):
    """The activations of the class token."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden[:, 0]


def build() -> nn.Module:
    config = ViTConfig(
        image_size=8,
        patch_size=4,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=CLASSES,
    )
    model: nn.Module = ViTForImageClassification(config)
    return model


def cut(model: Any) -> list[nn.Module]:
    body = model.vit
    return [
        nn.Sequential(body.embeddings, Layers(body.layers[0])),
        Layers(body.layers[1]),
        nn.Sequential(Layers(body.layers[2]), body.layernorm, ClassToken(), model.classifier),
    ]


def draw(generator: torch.Generator, m: int) -> Microbatch:
    rows = 1 + m % 3
    pixels = draw_floats(generator, rows, 3, 8, 8)
    labels = draw_integers(generator, CLASSES, rows)
    return Microbatch(inputs=pixels, whole={"pixel_values": pixels, "labels": labels}, target=labels, weight=rows)


CASE = Case(build=build, cut=cut, draw=draw, loss=nn.functional.cross_entropy, whole_loss=own_loss)
