"""Which rank holds which stages, gathered from all ranks."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rrfp.errors import ConfigError
from rrfp.integrations.torch.private import Stage

#: The first numbers that ranks exchange, which must be equal on all.
_COMMON = ("num_stages of the stages", "n_microbatches", "loss_fn", "scale_grads")

#: How to write the numbers that stand for something else.
_WORDS = {"loss_fn": ("None", "a function"), "scale_grads": ("False", "True")}


@dataclass(frozen=True, slots=True)
class Layout:
    """The stages of a pipeline."""

    #: The rank of every stage.
    ranks: tuple[int, ...]
    #: a number that the ranks of this schedule share, and no others.
    token: int

    @classmethod
    def gather(cls, stages: Sequence[Stage], microbatches: int, *, has_loss: bool, scales_grads: bool) -> Layout:
        """Exchange the stages of all ranks of the stages' group; blocks until all ranks call it."""
        first = stages[0]
        numbers = [first.num_stages, microbatches, has_loss, scales_grads, secrets.randbits(62)]
        by_rank = _all_gather(first, numbers)
        for name, values in zip(_COMMON, zip(*by_rank, strict=True), strict=False):
            if len(set(values)) > 1:
                shown = [_WORDS[name][value] for value in values] if name in _WORDS else values
                raise ConfigError(f"{name} is {_by_rank(shown)}, must be the same on all ranks")
        mine = {stage.stage_index for stage in stages}
        masks = _all_gather(first, [int(v in mine) for v in range(first.num_stages)])
        holders = [[rank for rank, mask in enumerate(masks) if mask[v]] for v in range(first.num_stages)]
        for v, ranks in enumerate(holders):
            if len(ranks) != 1:
                held = f"on the ranks {', '.join(map(str, ranks))}" if ranks else "on no rank"
                stages_of = [tuple(v for v, is_held in enumerate(mask) if is_held) for mask in masks]
                raise ConfigError(f"stages are {_by_rank(stages_of)}: stage {v} is {held}, must be on one")
        return cls(tuple(rank for (rank,) in holders), by_rank[0][-1])


def _all_gather(stage: Stage, values: Sequence[int]) -> list[list[int]]:
    """The values of every rank of the stage's group, by rank."""
    own = torch.tensor(values, dtype=torch.int64, device=stage.device)
    gathered = [torch.empty_like(own) for _ in range(stage.group_size)]
    dist.all_gather(gathered, own, group=stage.group)
    return [part.tolist() for part in gathered]


def _by_rank(values: Sequence[object]) -> str:
    shown = (list(value) if isinstance(value, tuple) else value for value in values)
    return ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(shown))
