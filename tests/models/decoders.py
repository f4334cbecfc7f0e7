"""Stages for models of Llama's build: the library's own stack, with fewer layers.

``LlamaModel`` and its many likes take ``inputs_embeds`` in place of tokens and do nothing else to them, so a stage is
such a model with a slice of the layers. Each makes its own mask and rotary embeddings out of keyword arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from models.case import Microbatch
from models.text import draw_tokens
from torch import Tensor, nn


class DecoderStage(nn.Module):
    """A slice of a decoder.

    Args:
        stack: the library's stack, of this stage's layers only.
        head: on the last stage.
        is_first: whether it is given tokens.
    """

    def __init__(self, stack: nn.Module, head: nn.Module | None, *, is_first: bool) -> None:
        super().__init__()
        self.stack, self.head, self.is_first = stack, head, is_first

    def forward(self, given: Tensor, **options: Any) -> Tensor:
        source = "input_ids" if self.is_first else "inputs_embeds"
        hidden: Tensor = self.stack(**{source: given}, use_cache=False, **options).last_hidden_state
        return hidden if self.head is None else self.head(hidden)


def slices(stack: Any, sizes: Sequence[int]) -> list[Any]:
    """The stack as ``len(sizes)`` stacks of that many layers, which share its modules."""
    found, start = [], 0
    for stage, size in enumerate(sizes):
        with torch.device("meta"):
            part = type(stack)(stack.config)
        part.layers = stack.layers[start : start + size]
        part.rotary_emb = stack.rotary_emb
        part.embed_tokens = stack.embed_tokens if stage == 0 else None
        part.norm = stack.norm if stage == len(sizes) - 1 else nn.Identity()
        part.train()
        found.append(part)
        start += size
    assert start == len(stack.layers)
    return found


def stages(stack: Any, head: nn.Module, sizes: Sequence[int]) -> list[nn.Module]:
    """One `DecoderStage` for each size."""
    parts = slices(stack, sizes)
    last = len(parts) - 1
    return [
        DecoderStage(part, head if index == last else None, is_first=index == 0) for index, part in enumerate(parts)
    ]


def draw(generator: torch.Generator, m: int) -> Microbatch:
    """Mask and positions go to every stage as keyword arguments; positions start anywhere."""
    tokens = draw_tokens(generator, m)
    options = {"attention_mask": tokens.mask, "position_ids": m + torch.arange(tokens.ids.shape[1])[None]}
    return Microbatch(
        inputs=tokens.ids,
        whole={"input_ids": tokens.ids, "use_cache": False, **options},
        target=tokens.labels,
        kwargs=options,
        weight=tokens.count,
    )
