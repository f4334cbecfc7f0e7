"""The ranks and groups of ``torch.distributed`` that a pipeline uses, and checks that they fit.

A pipeline numbers its ranks by its topology; ``torch.distributed`` may number the same processes otherwise, if the
topology was read from a `DeviceMesh`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from rrfp.compute.gradients.layout import as_dtensor
from rrfp.compute.gradients.module_checks import submodules
from rrfp.compute.gradients.reducer import parameters_once
from rrfp.errors import ConfigError
from rrfp.log import get_logger
from rrfp.model.graph import TextOf, numbered
from rrfp.model.mesh import PIPELINE, REPLICATED
from rrfp.model.topology import Topology

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


logger = get_logger(__name__)


def global_ranks(topology: Topology, mesh: DeviceMesh | None = None) -> tuple[int, ...]:
    """For each rank of ``topology`` its number in ``torch.distributed``."""
    if mesh is None:
        return tuple(range(topology.world))
    return tuple(int(rank) for rank in mesh.mesh.flatten())


def replica_group(topology: Topology, ranks: Sequence[int]) -> ProcessGroup:
    """Make a group of this rank and its counterparts in the other replicas; blocks until all have joined."""
    # Called on the lane of the group's collectives, whose device is then the thread's current one.
    # Why not a group of the DeviceMesh over the same ranks? The caller may use that one, and these collectives run on
    # another thread. Blocking cannot deadlock: these groups do not overlap, each rank joins one, and all ranks of a job
    # enter their pipelines in the same order.
    members = [ranks[rank] for rank in topology.mesh.counterparts(topology.rank)]
    group: ProcessGroup = dist.new_group(members, use_local_synchronization=True)
    return group


def all_gather_bytes(data: bytes, group: ProcessGroup) -> list[bytes]:
    """What each rank of ``group``, over the CPU, gives."""
    ranks = range(dist.get_world_size(group))
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in ranks]
    dist.all_gather(sizes, torch.tensor([len(data)]), group=group)
    lengths = [int(size) for size in sizes]
    own = torch.zeros(max(lengths), dtype=torch.uint8)
    own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    values = [torch.empty_like(own) for _ in ranks]
    dist.all_gather(values, own, group=group)
    return [value[:length].numpy().tobytes() for value, length in zip(values, lengths, strict=True)]


def check_replicas(topology: Topology, ranks: Sequence[int]) -> None:
    """Refuse replicas where ``torch.distributed`` does not have these ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            f"topology has {topology.summands} replicas, whose gradients torch.distributed sums: call "
            "torch.distributed.init_process_group() before the pipeline is made"
        )
    if dist.get_world_size() <= max(ranks) or dist.get_rank() != ranks[topology.rank]:
        raise ConfigError(
            f"topology says that this is rank {topology.rank} of {topology.world}, torch.distributed says rank "
            f"{dist.get_rank()} of {dist.get_world_size()}: must be the same, or give mesh= instead of topology="
        )


def check_world(topology: Topology) -> None:
    """Refuse a pipeline of some ranks of ``torch.distributed``, where those that are left make a group."""
    if dist.is_available() and dist.is_initialized() and (world := dist.get_world_size()) != topology.world:
        raise ConfigError(
            f"on_lost_rank is 'finish', must be 'abort' for a pipeline of {topology.world} of {world} ranks of "
            "torch.distributed: a checkpoint is of all"
        )


def check_sharded(
    modules: Mapping[int, nn.Module], topology: Topology, ranks: Sequence[int], text_of: TextOf = numbered
) -> None:
    """Refuse DTensors over ranks that run tasks in another order, by name."""
    group = {ranks[rank] for rank in topology.group}
    for _, name, parameter in parameters_once(modules, text_of):
        if (sharded := as_dtensor(parameter)) is None:
            continue
        members = sharded.device_mesh.mesh.flatten().tolist()
        if len(members) > 1 and not group.issuperset(members):
            raise ConfigError(f"{name} {_why_refused('a DTensor', members, topology, ranks)}")
        reduced = sorted(crossed(members, topology, ranks).intersection(topology.mesh.reduce))
        if reduced:
            raise ConfigError(
                f"{name} is a DTensor over the mesh dim {reduced[0]!r}, and its own collectives reduce its "
                f"gradients there: reduce is {topology.mesh.reduce!r}, must not have {reduced[0]!r}"
            )


def check_synchronised(
    modules: Mapping[int, nn.Module], topology: Topology, ranks: Sequence[int] | None, text_of: TextOf = numbered
) -> None:
    """Refuse synchronized batch norm over ranks that run tasks in another order."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    group = set() if ranks is None else {ranks[rank] for rank in topology.group}
    for where, part in submodules(modules, text_of):
        if not isinstance(part, nn.SyncBatchNorm):
            continue
        members = dist.get_process_group_ranks(part.process_group)
        if len(members) == 1 or group.issuperset(members):
            continue
        if ranks is None:
            raise ConfigError(
                f"{where} is a SyncBatchNorm over the ranks {members}, and all stages are in this process, which "
                "agrees with no other one on the order of tasks: must be without SyncBatchNorm"
            )
        raise ConfigError(f"{where} {_why_refused('a SyncBatchNorm', members, topology, ranks)}")


def warn_of_unreduced(modules: Mapping[int, nn.Module], topology: Topology, ranks: Sequence[int]) -> None:
    """Warn about gradients of coordinated ``dp`` dims that nothing reduces."""
    # Over a dim that is not coordinated the pipeline reduces; over a coordinated one a sharded parameter's own
    # collectives do. A module may also call collectives of its own, which cannot be seen: so this only warns.
    mesh = topology.mesh
    sizes = dict(mesh.dims)
    parameters = [parameter for module in modules.values() for parameter in module.parameters()]
    meshes = [sharded.device_mesh for sharded in map(as_dtensor, parameters) if sharded is not None]
    spanned = {name for each in meshes for name in crossed(each.mesh.flatten().tolist(), topology, ranks)}
    for name in mesh.coordinate:
        is_reduced = not name.startswith(REPLICATED) or name in mesh.reduce or sizes.get(name, 1) == 1
        if parameters and not is_reduced and name not in spanned:
            logger.warning(
                "mesh dim %r is coordinated and no parameter is sharded over it: no gradients are summed over it, "
                "unless the module does that itself; reduce=(%r,) sums them once a step",
                name,
                name,
            )


def _why_refused(what: str, members: Sequence[int], topology: Topology, ranks: Sequence[int]) -> str:
    problem = f"is {what} over the ranks {sorted(members)}, and its collectives run inside tasks"
    is_tensor = what == "a DTensor"
    owner = "the DTensor's mesh" if is_tensor else "its process_group"
    if unknown := sorted(set(members) - set(ranks)):
        return (
            f"{problem}, but the topology has no ranks {unknown}: {owner} must be within it, or give its mesh by mesh="
        )
    mesh = topology.mesh
    uncoordinated = crossed(members, topology, ranks) - set(mesh.coordinate)
    wanted = tuple(name for name, _ in mesh.dims if name in uncoordinated and name != PIPELINE)
    remedy = f"coordinate is {mesh.coordinate!r}, must be {(*mesh.coordinate, *wanted)!r}"
    if wanted and not is_tensor:
        remedy += f", with reduce={wanted!r} unless parameters are sharded over that"
    if PIPELINE in uncoordinated:
        problem += f", but these ranks are of several stages: {owner} must not have the dim {PIPELINE!r}"
        return f"{problem}; then {remedy}" if wanted and not is_tensor else problem
    return f"{problem}: {remedy}"


def crossed(members: Sequence[int], topology: Topology, ranks: Sequence[int]) -> set[str]:
    """The dims of the topology's mesh along which those of ``members`` that it has are elsewhere."""
    here = topology.mesh.coordinates(topology.rank)
    there = [topology.mesh.coordinates(ranks.index(rank)) for rank in members if rank in ranks]
    return {name for of_rank in there for name, index in of_rank.items() if index != here[name]}
