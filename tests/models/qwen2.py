"""Qwen2 in two stages: one weight is the embedding and the head, and layers are checkpointed (non-reentrant)."""

from __future__ import annotations

from typing import Any

from models import decoders
from models.case import Case, of_logits
from models.text import VOCABULARY, token_loss
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM


def build() -> nn.Module:
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=True,
    )
    model: Any = Qwen2ForCausalLM(config)
    model.activation_checkpointing_enable({"use_reentrant": False})
    assert model.lm_head.weight is model.model.embed_tokens.weight
    result: nn.Module = model
    return result


def cut(model: Any) -> list[nn.Module]:
    return decoders.stages(model.model, model.lm_head, [2, 1])


CASE = Case(build=build, cut=cut, draw=decoders.draw, loss=token_loss, whole_loss=of_logits(token_loss))
