"""Which rank holds which stages: gathered from all ranks, and compared with the placements that RRFP has."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist

from rrfp.errors import ConfigError
from rrfp.hints import Placement
from rrfp.integrations.torch.private import Stage

#: The placements of `rrfp.Pipeline`.
PlacementName = Literal["looped", "v"]

#: The first numbers that ranks exchange, which must be equal on all.
_COMMON = ("num_stages of the stages", "n_microbatches", "loss_fn", "scale_grads")

#: How to write the numbers that stand for something else.
_WORDS = {"loss_fn": ("None", "a function"), "scale_grads": ("False", "True")}


@dataclass(frozen=True, slots=True)
class Layout:
    """The stages of a pipeline."""

    #: How they lie on the ranks.
    placement: PlacementName
    #: The stages of each rank of the group.
    stages_of: tuple[tuple[int, ...], ...]
    #: a number that the ranks of this schedule share, and no others.
    token: int

    @property
    def rank_of(self) -> Mapping[int, int]:
        """The rank of every stage."""
        return {v: rank for rank, stages in enumerate(self.stages_of) for v in stages}

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
        stages_of = tuple(tuple(v for v, is_held in enumerate(mask) if is_held) for mask in masks)
        return cls(_placement(stages_of, first.num_stages), stages_of, by_rank[0][-1])


def _placement(stages_of: tuple[tuple[int, ...], ...], num_stages: int) -> PlacementName:
    ranks = len(stages_of)
    fitting = {}
    if num_stages % ranks == 0:
        for name in get_args(PlacementName):
            placement = Placement(ranks, num_stages // ranks, name)
            fitting[name] = tuple(map(placement.virtual_stages, range(ranks)))
            if fitting[name] == stages_of:
                layout: PlacementName = name
                return layout
    allowed = " or ".join(f"{name}: {_by_rank(held)}" for name, held in fitting.items())
    if not allowed:
        allowed = f"a multiple of {ranks}, as many on every rank"
    raise ConfigError(f"stages are {_by_rank(stages_of)} of {num_stages}, must be {allowed}")


def _all_gather(stage: Stage, values: Sequence[int]) -> list[list[int]]:
    """The values of every rank of the stage's group, by rank."""
    own = torch.tensor(values, dtype=torch.int64, device=stage.device)
    gathered = [torch.empty_like(own) for _ in range(stage.group_size)]
    dist.all_gather(gathered, own, group=stage.group)
    return [part.tolist() for part in gathered]


def _by_rank(values: Sequence[object]) -> str:
    shown = (list(value) if isinstance(value, tuple) else value for value in values)
    return ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(shown))
