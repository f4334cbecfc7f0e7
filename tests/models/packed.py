"""Llama by `rrfp.split` on packed sequences: rows without a mask, whose sequences only the positions tell apart."""

from __future__ import annotations

from typing import Any

import torch
from models.case import Case, Microbatch, draw_integers, of_logits
from models.llama import build
from models.text import IGNORED, VOCABULARY, token_loss
from torch import nn

import rrfp


def cut(model: Any) -> list[nn.Module]:
    return [chunk for stage in rrfp.split(model, 2) for chunk in stage.chunks]


def draw(generator: torch.Generator, m: int) -> Microbatch:
    """One row of two or three sequences; the last token of each predicts nothing."""
    lengths = [2 + (m + each) % 4 for each in range(2 + m % 2)]
    ids = draw_integers(generator, VOCABULARY, 1, sum(lengths))
    places = torch.cat([torch.arange(length) for length in lengths])[None]
    labels = ids.roll(-1, 1).masked_fill(places.roll(-1, 1) == 0, IGNORED)
    inputs = {"input_ids": ids, "position_ids": places}
    weight = float((labels != IGNORED).sum())
    # With a cache, as by default, transformers would let each sequence see those before it in the row.
    return Microbatch(inputs=inputs, whole={**inputs, "use_cache": False}, target=labels, weight=weight)


CASE = Case(build=build, cut=cut, draw=draw, loss=of_logits(token_loss), whole_loss=of_logits(token_loss))
