"""LLaVA in three stages: vision tower, and a Llama in halves. A microbatch has 0 to 3 images.

Without an image the first stage sends None for the patches, and there is nothing to differentiate there.
"""

from __future__ import annotations

from typing import Any

import torch
from models import decoders, llama
from models.case import Case, Microbatch, draw_floats, of_logits
from models.text import IGNORED, VOCABULARY, draw_tokens, token_loss
from torch import Tensor, nn
from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

#: The token in whose place a patch is put, and the patches of an image.
IMAGE, PATCHES = VOCABULARY - 1, 4


class Vision(nn.Module):
    """Images, if there are any, as embeddings of tokens: (patches of all images, hidden). Tokens are handed on."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.tower, self.projector = model.vision_tower, model.multi_modal_projector
        self.layer = model.config.vision_feature_layer

    def forward(self, ids: Tensor, pixels: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if pixels is None:
            return ids, None
        states = self.tower(pixels, output_hidden_states=True).hidden_states[self.layer]
        return ids, self.projector(states[:, 1:]).flatten(0, 1)  # all patches, without the class token


class Text(nn.Module):
    """Puts the patches among the tokens, and runs the first layers."""

    def __init__(self, stack: Any) -> None:
        super().__init__()
        self.stack = stack

    def forward(self, ids: Tensor, patches: Tensor | None) -> Tensor:
        embedded = self.stack.embed_tokens(ids)
        if patches is not None:
            embedded = embedded.masked_scatter((ids == IMAGE)[..., None], patches)
        hidden: Tensor = self.stack(inputs_embeds=embedded, use_cache=False).last_hidden_state
        return hidden


def build() -> nn.Module:
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
    )
    config = LlavaConfig(
        vision_config=vision, text_config=llama.config(), image_token_index=IMAGE, image_seq_length=PATCHES
    )
    model: nn.Module = LlavaForConditionalGeneration(config)
    return model


def cut(model: Any) -> list[nn.Module]:
    first, last = decoders.slices(model.model.language_model, [2, 2])
    return [Vision(model.model), Text(first), decoders.DecoderStage(last, model.lm_head, is_first=False)]


def draw(generator: torch.Generator, m: int) -> Microbatch:
    """Images of a microbatch are in its first row."""
    images, tokens = m % 4, draw_tokens(generator, m)
    rows = tokens.ids.shape[0]
    text = tokens.ids.clamp(max=IMAGE - 1)
    places = torch.zeros(rows, images * PATCHES, dtype=torch.long)
    places[:1] = IMAGE
    ids = torch.cat([places, text], dim=1)
    labels = torch.cat([torch.full_like(places, IGNORED), tokens.labels], dim=1)
    pixels = draw_floats(generator, images, 3, 8, 8) if images else None
    return Microbatch(
        inputs=(ids, pixels),
        whole={"input_ids": ids, "pixel_values": pixels, "use_cache": False},
        target=labels,
        weight=tokens.count,
    )


CASE = Case(build=build, cut=cut, draw=draw, loss=token_loss, whole_loss=of_logits(token_loss))
