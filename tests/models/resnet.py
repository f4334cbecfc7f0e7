"""ResNet in three stages: its BatchNorms' running statistics depend on the order of microbatches."""

from __future__ import annotations

from typing import Any

import torch
from models.case import Case, Microbatch, draw_floats, draw_integers, own_loss
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification

CLASSES = 5


def build() -> nn.Module:
    config = ResNetConfig(
        num_channels=3,
        embedding_size=8,
        hidden_sizes=[8, 12, 16],
        depths=[1, 1, 1],
        layer_type="basic",
        num_labels=CLASSES,
    )
    model: nn.Module = ResNetForImageClassification(config)
    return model


def cut(model: Any) -> list[nn.Module]:
    body = model.resnet
    first, middle, last = body.encoder.stages
    return [
        nn.Sequential(body.embedder, first),
        middle,
        nn.Sequential(last, body.pooler, model.classifier),
    ]


def draw(generator: torch.Generator, m: int) -> Microbatch:
    rows, size = 2 + m % 3, 16 + 8 * (m % 2)
    pixels, labels = draw_floats(generator, rows, 3, size, size), draw_integers(generator, CLASSES, rows)
    return Microbatch(inputs=pixels, whole={"pixel_values": pixels, "labels": labels}, target=labels, weight=rows)


CASE = Case(build=build, cut=cut, draw=draw, loss=nn.functional.cross_entropy, whole_loss=own_loss)
