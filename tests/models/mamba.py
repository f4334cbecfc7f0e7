"""Mamba in two stages, by the library's implementation in plain torch: one weight is the embedding and the head."""

from __future__ import annotations

from typing import Any

import torch
from models.case import Case, Microbatch, of_logits
from models.text import VOCABULARY, draw_tokens, token_loss
from torch import Tensor, nn
from transformers import MambaConfig, MambaForCausalLM


class Last(nn.Module):
    """The last layers, and the head; logits are rounded to float32, as the library does."""

    def __init__(self, layers: nn.ModuleList, norm: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.layers, self.norm, self.head = nn.Sequential(*layers), norm, head

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.head(self.norm(self.layers(hidden)))
        return output.float()


def build() -> nn.Module:
    config = MambaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        state_size=4,
        num_hidden_layers=3,
        time_step_rank=2,
        residual_in_fp32=False,
        use_cache=False,
    )
    model: Any = MambaForCausalLM(config)
    assert model.lm_head.weight is model.backbone.embeddings.weight
    result: nn.Module = model
    return result


def cut(model: Any) -> list[nn.Module]:
    body = model.backbone
    return [nn.Sequential(body.embeddings, *body.layers[:2]), Last(body.layers[2:], body.norm_f, model.lm_head)]


def draw(generator: torch.Generator, m: int) -> Microbatch:
    tokens = draw_tokens(generator, m)
    return Microbatch(inputs=tokens.ids, whole={"input_ids": tokens.ids}, target=tokens.labels, weight=tokens.count)


CASE = Case(build=build, cut=cut, draw=draw, loss=token_loss, whole_loss=of_logits(token_loss))
