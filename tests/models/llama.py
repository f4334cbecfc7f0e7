"""Llama with grouped queries in three stages: mask and positions by keyword, the library's stack in slices."""

from __future__ import annotations

from typing import Any

from models import decoders
from models.case import Case, of_logits
from models.text import VOCABULARY, token_loss
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM


def config() -> Any:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )


def build() -> nn.Module:
    model: nn.Module = LlamaForCausalLM(config())
    return model


def cut(model: Any) -> list[nn.Module]:
    return decoders.stages(model.model, model.lm_head, [1, 2, 1])


CASE = Case(build=build, cut=cut, draw=decoders.draw, loss=token_loss, whole_loss=of_logits(token_loss))
