"""Llama whose first stage computes rotary tables for all, in a buffer that each microbatch fills anew."""

from __future__ import annotations

from typing import Any

import torch
from models.case import Case, Microbatch, of_logits
from models.llama import build
from models.text import draw_tokens, token_loss
from torch import Tensor, nn
from transformers.masking_utils import create_causal_mask

#: More than any microbatch has tokens.
MOST = 16


class Tables(nn.Module):
    """The embedding; what it returns beside is a part of its buffer."""

    tables: Tensor

    def __init__(self, stack: Any) -> None:
        super().__init__()
        self.embed_tokens, self.rotary_emb, self.config = stack.embed_tokens, stack.rotary_emb, stack.config
        width = stack.config.hidden_size // stack.config.num_attention_heads
        self.register_buffer("tables", torch.zeros(2, 1, MOST, width, dtype=torch.float64), persistent=False)

    def forward(self, ids: Tensor, mask: Tensor, places: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        hidden, length = self.embed_tokens(ids), ids.shape[1]
        shared = {"config": self.config, "inputs_embeds": hidden, "past_key_values": None}
        mask_4d = create_causal_mask(**shared, attention_mask=mask, position_ids=places)
        for table, values in zip(self.tables, self.rotary_emb(hidden, position_ids=places), strict=True):
            table[:, :length] = values
        return hidden, mask_4d, self.tables[0, :, :length], self.tables[1, :, :length]


class Layers(nn.Module):
    """Some layers, and on the last stage the norm and the head."""

    def __init__(self, layers: Any, end: nn.Module | None = None) -> None:
        super().__init__()
        self.layers, self.end = layers, end

    def forward(self, hidden: Tensor, mask: Tensor | None, cosines: Tensor, sines: Tensor) -> Any:
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=mask, position_embeddings=(cosines, sines))
        return (hidden, mask, cosines, sines) if self.end is None else self.end(hidden)


def cut(model: Any) -> list[nn.Module]:
    stack = model.model
    end = nn.Sequential(stack.norm, model.lm_head)
    return [Tables(stack), Layers(stack.layers[:2]), Layers(stack.layers[2:], end)]


def draw(generator: torch.Generator, m: int) -> Microbatch:
    """Positions begin elsewhere in each microbatch, so the tables of another one are wrong."""
    tokens = draw_tokens(generator, m)
    places = 2 * m + torch.arange(tokens.ids.shape[1])[None]
    return Microbatch(
        inputs=(tokens.ids, tokens.mask, places),
        whole={"input_ids": tokens.ids, "attention_mask": tokens.mask, "position_ids": places, "use_cache": False},
        target=tokens.labels,
        weight=tokens.count,
    )


CASE = Case(build=build, cut=cut, draw=draw, loss=token_loss, whole_loss=of_logits(token_loss))
