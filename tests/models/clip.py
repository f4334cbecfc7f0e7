"""CLIP's two towers in two stages: the first sees the images, and hands the text on to the second."""

from __future__ import annotations

from typing import Any

import torch
from models.case import Case, Microbatch, draw_floats, own_loss
from models.text import VOCABULARY, draw_tokens
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPModel

END = VOCABULARY - 1


class Images(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.tower, self.projection = model.vision_model, model.visual_projection

    def forward(self, pixels: Tensor, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.projection(self.tower(pixels).pooler_output), ids, mask


class Texts(nn.Module):
    """Similarities of texts (rows) and images (columns)."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.tower, self.projection, self.scale = model.text_model, model.text_projection, model.logit_scale

    def forward(self, images: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        texts = self.projection(self.tower(ids, attention_mask=mask).pooler_output)
        unit = nn.functional.normalize
        similarity: Tensor = unit(texts, dim=-1) @ unit(images, dim=-1).t() * self.scale.exp()
        return similarity


def build() -> nn.Module:
    shared: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    text = {**shared, "vocab_size": VOCABULARY, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": END}
    vision = {**shared, "image_size": 8, "patch_size": 4}
    model: nn.Module = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=12))
    return model


def cut(model: Any) -> list[nn.Module]:
    return [Images(model), Texts(model)]


def draw(generator: torch.Generator, m: int) -> Microbatch:
    tokens = draw_tokens(generator, 1 + m % 2)  # one row would match by itself
    tokens.ids[:, 3] = END
    pixels = draw_floats(generator, tokens.ids.shape[0], 3, 8, 8)
    return Microbatch(
        inputs=(pixels, tokens.ids, tokens.mask),
        whole={
            "pixel_values": pixels,
            "input_ids": tokens.ids,
            "attention_mask": tokens.mask,
            "return_loss": True,
        },
        weight=tokens.ids.shape[0],
    )


def loss(similarity: Tensor, target: None) -> Tensor:
    """How well each text finds its image, and each image its text."""
    pairs = torch.arange(similarity.shape[0])
    cross_entropy = nn.functional.cross_entropy
    return (cross_entropy(similarity, pairs) + cross_entropy(similarity.t(), pairs)) / 2


CASE = Case(build=build, cut=cut, draw=draw, loss=loss, whole_loss=own_loss)
