"""Cases for 4 ranks, two stages by two replicas, some of which do not take part in a save; all load it."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from runtime.checkpoint_ranks import adamw, layer
from runtime.toys import loss_fn
from torch import nn

import rrfp
from rrfp import checkpoint
from rrfp.checkpoint.ranks import under_way
from rrfp.errors import ConfigError
from rrfp.model.mesh import Mesh

MESH = Mesh((("pp", 2), ("dp", 2)))


@dataclass
class Survivors:
    """What a pipeline has that has lost ranks."""

    group: dist.ProcessGroup


class Pipe:
    """A pipeline, of which some ranks are left."""

    def __init__(self, rank: int, parts: Mapping[str, nn.Module], left: Sequence[int] = ()) -> None:
        (model,) = parts.values()
        self.state = rrfp.Pipeline(model, topology=rrfp.Topology.at(rank, MESH), loss_fn=loss_fn, first_step=3)
        if left:  # all ranks come here: torch counts the groups that each has made
            self._survivors = Survivors(dist.new_group([*left], backend="gloo"))

    def state_dict(self) -> dict[str, Any]:
        return self.state.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.state.load_state_dict(state)


def parts_of(rank: int, seed: int) -> dict[str, nn.Module]:
    """The layer of a rank's stage; the statistics are of its replica."""
    stage, replica, _ = MESH.place_of(rank)
    own = layer(10 * seed + stage, 0.0, norm=True)
    norm: Any = own[1]  # type: ignore[index]
    with torch.no_grad():
        norm.running_mean.fill_(100 * seed + 10 * stage + replica)
    return {f"layers.{stage}": own}


def folder_of_all() -> Path:
    """A new folder."""
    made = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(made)
    return Path(made[0])


def mean_of(part: nn.Module) -> float:
    return float(part[1].running_mean[0])  # type: ignore[index]


def those_that_are_left_save_what_all_load(rank: int) -> None:
    stage = MESH.place_of(rank).stage
    for lost in ([0], [3], [0, 3], [2]):
        folder = folder_of_all()
        before = parts_of(rank, 9)  # a save of all ranks, by rank 0
        checkpoint.save(folder, before, adamw(before), pipe=Pipe(rank, before))
        left = [other for other in range(4) if other not in lost]
        parts = parts_of(rank, 1)
        torch.manual_seed(rank)
        state = torch.get_rng_state()
        pipe = Pipe(rank, parts, left)
        if rank not in lost:
            checkpoint.save(folder, parts, adamw(parts), pipe=pipe, extra=rank)
        dist.barrier()
        torch.manual_seed(77)
        loaded_parts = parts_of(rank, 2)
        pipe = Pipe(rank, loaded_parts)
        loaded = checkpoint.load(folder, loaded_parts, adamw(loaded_parts), pipe=pipe)
        assert loaded is not None
        assert loaded.step == 3
        for ours, theirs in zip(loaded_parts.values(), parts.values(), strict=True):
            assert all(map(torch.equal, ours.parameters(), theirs.parameters()))
        # Of a lost rank there is what another one has: its stage's statistics, and its replica's extra.
        partner = rank ^ 1 if rank in lost else rank
        assert mean_of(*loaded_parts.values()) == 100 + 10 * stage + MESH.place_of(partner).replica
        assert loaded.extra == (rank if rank not in lost else rank ^ 2)
        assert torch.equal(torch.get_rng_state(), state) == (rank not in lost)
        dist.barrier()


def an_error_names_the_rank_by_its_number(rank: int) -> None:
    folder, parts = folder_of_all(), parts_of(rank, 1)
    pipe, extra = Pipe(rank, parts, [1, 2, 3]), object() if rank == 2 else None
    if rank:
        with pytest.raises(ConfigError, match="rank 2's extra is a object"):
            checkpoint.save(folder, parts, pipe=pipe, extra=extra)


def a_save_that_was_under_way_is_given_up(rank: int) -> None:
    folder, parts = folder_of_all(), parts_of(rank, 1)
    under_way.append(Future())
    pipe = Pipe(rank, parts, [1, 2, 3])
    if rank:
        checkpoint.save(folder, parts, pipe=pipe)
    under_way.clear()
    dist.barrier()
    assert checkpoint.latest(folder) is not None
