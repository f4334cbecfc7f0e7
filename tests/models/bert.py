"""BERT for masked tokens in two stages, called with dicts: one weight is the word embedding and the decoder."""

from __future__ import annotations

from typing import Any

import torch
from models.case import Case, Microbatch, draw_integers, of_logits
from models.text import VOCABULARY, draw_tokens, token_loss
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM
from transformers.masking_utils import create_bidirectional_mask


class First(nn.Module):
    def __init__(self, model: Any, layers: nn.ModuleList) -> None:
        super().__init__()
        self.embeddings, self.layers, self.config = model.embeddings, layers, model.config

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor | None]:
        hidden = self.embeddings(input_ids=input_ids, token_type_ids=token_type_ids)
        mask = create_bidirectional_mask(self.config, hidden, attention_mask=attention_mask)
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return {"hidden": hidden, "mask": mask}


class Last(nn.Module):
    def __init__(self, layers: nn.ModuleList, head: nn.Module) -> None:
        super().__init__()
        self.layers, self.head = layers, head

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden, mask)
        output: Tensor = self.head(hidden)
        return output


def build() -> nn.Module:
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model: nn.Module = BertForMaskedLM(config)
    return model


def cut(model: Any) -> list[nn.Module]:
    layers = model.bert.encoder.layer
    return [First(model.bert, layers[:2]), Last(layers[2:], model.cls)]


def draw(generator: torch.Generator, m: int) -> Microbatch:
    tokens = draw_tokens(generator, m)
    inputs = {
        "input_ids": tokens.ids,
        "token_type_ids": draw_integers(generator, 2, *tokens.ids.shape),
        "attention_mask": tokens.mask,
    }
    return Microbatch(inputs=inputs, whole=inputs, target=tokens.labels, weight=tokens.count)


CASE = Case(build=build, cut=cut, draw=draw, loss=token_loss, whole_loss=of_logits(token_loss))
