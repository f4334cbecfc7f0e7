"""Mixtral in two stages: the auxiliary loss is over the routers of both, whose logits travel beside the activations."""

from __future__ import annotations

from typing import Any

import torch
from models import decoders
from models.case import Case, Microbatch
from models.text import VOCABULARY, token_loss
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

EXPERTS, CHOSEN = 4, 2

#: The router logits of each layer so far.
Routers = tuple[Tensor, ...]


class RoutedStage(nn.Module):
    """Some layers; the router logits of the layers before are handed on with its own."""

    def __init__(self, stack: nn.Module, head: nn.Module | None) -> None:
        super().__init__()
        self.stack, self.head = stack, head

    def forward(self, given: Tensor, before: Routers | None = None, **options: Any) -> tuple[Tensor, Routers]:
        source = "input_ids" if before is None else "inputs_embeds"
        output = self.stack(**{source: given}, use_cache=False, output_router_logits=True, **options)
        hidden = output.last_hidden_state
        return hidden if self.head is None else self.head(hidden), (*(before or ()), *output.router_logits)


def build() -> nn.Module:
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        max_position_embeddings=32,
    )
    model: Any = MixtralForCausalLM(config)
    model.set_experts_implementation("eager")  # the grouped product has no float64
    result: nn.Module = model
    return result


def cut(model: Any) -> list[nn.Module]:
    first, last = decoders.slices(model.model, [2, 1])
    return [RoutedStage(first, None), RoutedStage(last, model.lm_head)]


def draw(generator: torch.Generator, m: int) -> Microbatch:
    drawn = decoders.draw(generator, m)
    return Microbatch(
        inputs=drawn.inputs,
        whole={**drawn.whole, "output_router_logits": True},
        target=(drawn.target, drawn.kwargs["attention_mask"]),
        kwargs=drawn.kwargs,
        weight=drawn.weight,
    )


def loss(output: tuple[Tensor, Routers], target: tuple[Tensor, Tensor]) -> Tensor:
    (logits, routers), (labels, mask) = output, target
    balance: Tensor = load_balancing_loss_func(tuple(routers), EXPERTS, CHOSEN, mask)
    return token_loss(logits, labels) + 0.5 * balance


def whole_loss(output: Any, target: tuple[Tensor, Tensor]) -> Tensor:
    return loss((output.logits, output.router_logits), target)


CASE = Case(build=build, cut=cut, draw=draw, loss=loss, whole_loss=whole_loss)
