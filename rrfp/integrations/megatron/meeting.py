"""Which ranks make a pipeline, and how they are laid out: agreed on over Megatron's process groups."""

from __future__ import annotations

import os
import socket
import uuid
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from rrfp import Topology
from rrfp.errors import ConfigError
from rrfp.host import boot_id
from rrfp.integrations.megatron.upstream import expert_group, tensor_and_context_group


@dataclass(frozen=True, slots=True)
class Meeting:
    """What the ranks of one pipeline know of each other."""

    topology: Topology
    #: The ranks of ``torch.distributed``, by stage and member.
    ranks: tuple[tuple[int, ...], ...]
    #: Of the pipeline, the same on all its ranks and used once.
    name: str

    @classmethod
    def over(cls, groups: Any, config: Any) -> Meeting:
        """Meet the other ranks. A collective over the pipeline's groups.

        Ranks that join in collectives inside tasks form a group, which runs tasks in its leader's order. No launcher is
        needed: `torch.distributed` knows the ranks, and the pipeline meets over its default store.
        """
        joined, pipeline = joined_group(groups, config), groups.pp
        own = (dist.get_rank(), _host(), uuid.uuid4().hex[:12])
        row = _gathered(joined, own)
        rows = _gathered(pipeline, row)
        stage, member = pipeline.rank(), joined.rank()
        ranks = tuple(tuple(rank for rank, _, _ in each) for each in rows)
        column = tuple(dist.get_process_group_ranks(pipeline))
        if any(len(each) != len(row) for each in ranks) or tuple(each[member] for each in ranks) != column:
            raise ConfigError(
                f"the pipeline of ranks {column} meets groups of ranks {ranks}: must have the same number of ranks on "
                "each stage, each behind the one of the stage before"
            )
        near = sum(host == own[1] for each in rows for _, host, _ in each)
        environ = {
            "RANK": str(stage * len(row) + member),
            "WORLD_SIZE": str(len(rows) * len(row)),
            "LOCAL_WORLD_SIZE": str(near),
            "TORCHELASTIC_RUN_ID": os.environ.get("TORCHELASTIC_RUN_ID", "megatron"),
            "TORCHELASTIC_RESTART_COUNT": os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        }
        dims = {"pp": len(rows)} if len(row) == 1 else {"pp": len(rows), "tp": len(row)}
        return cls(Topology.from_env(environ, dims=dims), ranks, f"megatron-{rows[0][0][2]}")


def joined_group(groups: Any, config: Any) -> dist.ProcessGroup:
    """The ranks of a stage whose collectives run inside tasks: of tensor, context and expert parallelism."""
    inner = tensor_and_context_group(groups)
    experts_across = getattr(config, "expert_tensor_parallel_size", None) or groups.tp.size()
    if getattr(config, "expert_model_parallel_size", 1) == 1 and experts_across == groups.tp.size():
        return inner
    experts = expert_group(groups)
    first, second = (set(dist.get_process_group_ranks(group)) for group in (inner, experts))
    if second <= first:
        return inner
    if first <= second:
        return experts
    raise ConfigError(
        f"tensor and context parallelism join ranks {sorted(first)}, expert parallelism {sorted(second)}: one of the "
        "two must hold the other, so that there is a group which runs tasks in one order"
    )


def _gathered(group: dist.ProcessGroup, value: Any) -> list[Any]:
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def _host() -> str:
    """Names this host: containers of one host have names of their own, hosts made of one image may share theirs."""
    boot = ""
    with suppress(OSError):
        boot = boot_id()
    return f"{socket.gethostname()} {boot}"
