"""A Llama adapted with LoRA in three stages: peft replaces layers in place, so the cut is that of the plain model.

All else is frozen, and the first stage's embedding has no gradient to send for.
"""

from __future__ import annotations

from typing import Any

from models import decoders, llama
from models.case import Case, of_logits
from models.text import token_loss
from peft import LoraConfig, get_peft_model
from torch import nn


def build() -> nn.Module:
    adapters = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0)
    model: nn.Module = get_peft_model(llama.build(), adapters)
    return model


def cut(model: Any) -> list[nn.Module]:
    return llama.cut(model.base_model.model)


CASE = Case(build=build, cut=cut, draw=decoders.draw, loss=token_loss, whole_loss=of_logits(token_loss))
