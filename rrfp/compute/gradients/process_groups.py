"""Where a pipeline meets ``torch.distributed``: which ranks are which, the groups of replicas, and what is refused.

A pipeline's ranks are numbered by its layout; in ``torch.distributed`` the same processes may have other numbers, if a
`DeviceMesh` says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from rrfp.compute.gradients.layout import as_dtensor
from rrfp.compute.gradients.reducer import named_parameters
from rrfp.core.mesh import PIPELINE, REPLICATED, Place
from rrfp.core.topology import Topology
from rrfp.errors import ConfigError
from rrfp.log import get_logger

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


logger = get_logger(__name__)


def global_ranks(place: Topology, mesh: DeviceMesh | None = None) -> tuple[int, ...]:
    """For each rank of the layout, its number in ``torch.distributed``.

    Args:
        place: where this process is.
        mesh: the mesh that the place was read from; without one the numbers are the same.
    """
    if mesh is None:
        return tuple(range(place.world))
    return tuple(int(rank) for rank in mesh.mesh.flatten())


def replica_group(place: Topology, ranks: Sequence[int]) -> ProcessGroup:
    """Make a group of this rank and its likes in the other replicas, in the order of replicas.

    It is a group of its own even where a mesh has one over the same ranks, since its collectives are made on another
    thread than the caller's. It lives until ``torch.distributed`` ends.

    Blocks until all its ranks are here. That cannot go round in a circle: these groups do not overlap, a rank waits for
    its own only, and every rank of a job enters its pipelines in the same order (the caller waits meanwhile, so it is
    not in the midst of whatever else the job does).

    Args:
        place: where this process is.
        ranks: those of `global_ranks`.
    """
    places = (Place(place.stage, replica, place.member) for replica in range(place.replicas))
    like = [ranks[place.mesh.rank(each)] for each in places]
    group: ProcessGroup = dist.new_group(like, use_local_synchronization=True)
    return group


def check_replicas(place: Topology, ranks: Sequence[int]) -> None:
    """Refuse a place with replicas whose gradients cannot be summed.

    Args:
        place: where this process is.
        ranks: those of `global_ranks`.

    Raises:
        ConfigError: if ``torch.distributed`` is not initialised, or has other ranks.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            f"topology has {place.replicas} replicas, whose gradients torch.distributed sums: call "
            "torch.distributed.init_process_group() before the pipeline is made"
        )
    if dist.get_world_size() <= max(ranks) or dist.get_rank() != ranks[place.rank]:
        raise ConfigError(
            f"topology says that this is rank {place.rank} of {place.world}, torch.distributed says rank "
            f"{dist.get_rank()} of {dist.get_world_size()}: must be the same, or give mesh= instead of topology="
        )


def check_sharded(modules: Mapping[int, nn.Module], place: Topology, ranks: Sequence[int]) -> None:
    """Refuse parameters whose collectives would run between ranks that do not keep one order of tasks.

    A module with DTensor parameters talks to the ranks of their mesh in the middle of its tasks, so all of those must
    be in this rank's group.

    Args:
        modules: by virtual stage.
        place: where this process is.
        ranks: those of `global_ranks`.

    Raises:
        ConfigError: naming the first such parameter and what ``coordinate`` must be.
    """
    group = {ranks[rank] for rank in place.group}
    for v, module in sorted(modules.items()):
        for name, parameter in named_parameters(v, module):
            if (sharded := as_dtensor(parameter)) is None:
                continue
            met = sharded.device_mesh.mesh.flatten().tolist()
            if len(met) > 1 and not group.issuperset(met):
                raise ConfigError(f"{name} {_why_refused(met, place, ranks)}")


def warn_of_unreduced(modules: Mapping[int, nn.Module], place: Topology, ranks: Sequence[int]) -> None:
    """Say where the gradients of coordinated ``dp`` dims are summed by nobody, as far as can be told.

    Args:
        modules: by virtual stage.
        place: where this process is.
        ranks: those of `global_ranks`.
    """
    mesh = place.mesh
    here, sizes = mesh.coordinates(place.rank), dict(mesh.dims)
    parameters = [parameter for module in modules.values() for parameter in module.parameters()]
    met = {
        rank
        for one in map(as_dtensor, parameters)
        if one is not None
        for rank in one.device_mesh.mesh.flatten().tolist()
    }
    spread = [mesh.coordinates(ranks.index(rank)) for rank in met if rank in ranks]
    for name in mesh.coordinate:
        is_met = any(at[name] != here[name] for at in spread if name in at)
        if parameters and name.startswith(REPLICATED) and sizes.get(name, 1) > 1 and not is_met:
            logger.warning(
                "mesh dim %r is coordinated and no parameter is sharded over it: nobody sums gradients over it, unless "
                "the module does",
                name,
            )


def _why_refused(met: Iterable[int], place: Topology, ranks: Sequence[int]) -> str:
    """Why a DTensor over the ranks ``met`` does not fit."""
    told = f"is a DTensor over the ranks {sorted(met)}, and its collectives run inside tasks"
    if strangers := sorted(set(met) - set(ranks)):
        return f"{told}, but the topology has no ranks {strangers}: must have the DTensor's dims, or be made by mesh="
    mesh = place.mesh
    here = mesh.coordinates(place.rank)
    spread = {
        name
        for rank in met
        for name, index in mesh.coordinates(ranks.index(rank)).items()
        if index != here[name] and name not in mesh.coordinate
    }
    if PIPELINE in spread:
        return f"{told}, but these ranks are of several stages: the DTensor's mesh must not have the dim {PIPELINE!r}"
    wanted = (*mesh.coordinate, *(name for name, _ in mesh.dims if name in spread))
    return f"{told}: coordinate is {mesh.coordinate!r}, must be {wanted!r}"
