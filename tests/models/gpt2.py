"""GPT-2 in four stages: one weight is the embedding and the head, and the mask travels with the activations.

``GPT2Model.forward`` adds position embeddings even to ``inputs_embeds``: a stage cannot reuse it and calls the blocks.
"""

from __future__ import annotations

from typing import Any

import torch
from models.case import Case, Microbatch, of_logits
from models.text import VOCABULARY, draw_tokens, token_loss
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.masking_utils import create_causal_mask


class Embedding(nn.Module):
    """Tokens in; the activations and the mask of all blocks out."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.tokens, self.places, self.config = model.wte, model.wpe, model.config

    def forward(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor | None]:
        hidden = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        causal = create_causal_mask(self.config, hidden, attention_mask=mask, past_key_values=None)
        return hidden, causal


class Blocks(nn.Module):
    """Some blocks; the mask goes on to the next stage."""

    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, hidden: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        for block in self.blocks:
            hidden = block(hidden, attention_mask=mask)
        return hidden, mask


class Head(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.norm, self.head = model.transformer.ln_f, model.lm_head

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        output: Tensor = self.head(self.norm(hidden))
        return output


class Chain(nn.Module):
    """Modules one after the other, each called with all that the one before returns."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, *values: Any) -> Any:
        for part in self.parts:
            given = values
            values = part(*given)
        return values


def build() -> nn.Module:
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=16,
        n_embd=16,
        n_layer=4,
        n_head=2,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model: nn.Module = GPT2LMHeadModel(config)
    return model


def cut(model: Any) -> list[nn.Module]:
    body = model.transformer
    return [
        Chain(Embedding(body), Blocks(body.h[:1])),
        Blocks(body.h[1:2]),
        Blocks(body.h[2:3]),
        Chain(Blocks(body.h[3:]), Head(model)),
    ]


def draw(generator: torch.Generator, m: int) -> Microbatch:
    tokens = draw_tokens(generator, m)
    return Microbatch(
        inputs=(tokens.ids, tokens.mask),
        whole={"input_ids": tokens.ids, "attention_mask": tokens.mask, "use_cache": False},
        target=tokens.labels,
        weight=tokens.count,
    )


CASE = Case(build=build, cut=cut, draw=draw, loss=token_loss, whole_loss=of_logits(token_loss))
