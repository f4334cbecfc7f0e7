"""The norm of all gradients of a model that is spread over stages, shards and replicas, and scaling them by it.

The norm of a model is the norm of the norms of its parts, provided that every element is in exactly one part. So each
rank gives the norm of what it answers for:

- of several replicas, which hold the same totals after their reduction, the first;
- a plain tensor is the same on all ranks of a group, and member 0 answers for it;
- of a ``DTensor`` every rank answers for its shard. Where it is a copy along a dim of its mesh, and along the group's
  dims that its mesh does not have, the ranks with coordinate 0 there do.

Norms are formed in float64 and combined in the order of ranks, so all ranks get the same number to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rrfp.compute.gradients.layout import as_dtensor, check_dense, local_part
from rrfp.compute.gradients.reducer import named_parameters
from rrfp.core.topology import Topology
from rrfp.errors import ConfigError


def check_norm(max_norm: float, norm_type: float) -> None:
    """Refuse what is no norm to clip by.

    Raises:
        ConfigError: if ``max_norm`` is not a number from 0 on, or ``norm_type`` none above 0 (infinity is one).
    """
    told: tuple[tuple[str, Any, str], ...] = (
        ("max_norm", max_norm, "a number from 0 on"),
        ("norm_type", norm_type, "a number above 0, or inf"),
    )
    for field, value, wanted in told:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not value >= 0 or (field == "norm_type" and value == 0):
            raise ConfigError(f"{field} is {value!r}, must be {wanted}")


@torch.no_grad()
def local_norm(
    modules: Mapping[int, nn.Module],
    norm_type: float = 2.0,
    *,
    place: Topology | None = None,
    ranks: Sequence[int] | None = None,
    skip: Collection[Tensor] = (),
) -> float:
    """The norm of the gradients that this rank answers for.

    A gradient that is a partial sum over a mesh becomes a copy: its ranks exchange their parts, so all of them have to
    make this call, and no task may run. Call it on the thread of the optimizer.

    Args:
        modules: of this process, by virtual stage; what several of them share counts once.
        norm_type: p of the p-norm.
        place: where this rank is; by default it answers for all that it has.
        ranks: the ranks of the layout in ``torch.distributed``; by default with the same numbers.
        skip: parameters that another rank answers for, such as those that two stages share.

    Raises:
        StageError: if a gradient is neither dense nor of the layout ``torch.sparse_coo``; names the parameter.
    """
    skipped = {id(tensor) for tensor in skip}
    place = Topology(0, 1) if place is None else place
    numbers = range(place.world) if ranks is None else ranks
    norms: list[float] = []
    for name, parameter in parameters_once(modules):
        if parameter.grad is None:
            continue
        if parameter.grad.layout is not torch.sparse_coo:
            check_dense(parameter.grad, name)
        parameter.grad = gradient = _without_partial_sums(parameter.grad)
        if id(parameter) not in skipped and _answers_for(gradient, place, numbers):
            part = local_part(gradient)
            if part.is_sparse:  # entries of one index are one element
                part = part.coalesce().values()
            if part.numel():
                part = part.abs() if part.is_complex() else part
                norms.append(float(torch.linalg.vector_norm(part, norm_type, dtype=torch.float64)))
    return combined_norm(norms, norm_type)


def combined_norm(norms: Sequence[float], norm_type: float = 2.0) -> float:
    """The norm of the whole, from those of its parts."""
    if not norms:
        return 0.0
    return float(torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64), norm_type))


@torch.no_grad()
def clip(modules: Mapping[int, nn.Module], max_norm: float, norm: float) -> None:
    """Scale all gradients in place so that their norm, which was ``norm``, is ``max_norm`` at most.

    As ``torch.nn.utils.clip_grad_norm_`` does it: by ``max_norm / (norm + 1e-6)`` where that is below 1, and where that
    is not a number, so that a NaN is not hidden. Where ``max_norm`` is inf nothing is scaled, whatever the norm.
    """
    factor = max_norm / (norm + 1e-6)
    if math.isinf(max_norm) or factor >= 1.0:
        return
    for _, parameter in parameters_once(modules):
        if parameter.grad is not None:
            part = local_part(parameter.grad)
            (part._values() if part.is_sparse else part).mul_(factor)


def parameters_once(modules: Mapping[int, nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter once, with what people call it."""
    seen: set[int] = set()
    for v, module in sorted(modules.items()):
        for name, parameter in named_parameters(v, module):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, parameter


def _without_partial_sums(gradient: Tensor) -> Tensor:
    sharded = as_dtensor(gradient)
    if sharded is None or not any(placement.is_partial() for placement in sharded.placements):
        return gradient
    from torch.distributed.tensor import Replicate

    wanted = [Replicate() if placement.is_partial() else placement for placement in sharded.placements]
    copies: Tensor = sharded.redistribute(placements=wanted)
    return copies


def _answers_for(gradient: Tensor, place: Topology, ranks: Sequence[int]) -> bool:
    """Whether it is this rank whose part of ``gradient`` counts, of all that hold the same."""
    if place.replica != 0:
        return False
    sharded = as_dtensor(gradient)
    here = place.mesh.coordinates(place.rank)
    spanned: set[str] = set()
    if sharded is not None:
        at: Sequence[int] = sharded.device_mesh.get_coordinate() or ()
        if any(index and placement.is_replicate() for index, placement in zip(at, sharded.placements, strict=True)):
            return False
        spanned = _spanned(sharded.device_mesh, place, ranks)
    return not any(here[name] for name, _ in place.mesh.dims if name in place.mesh.coordinate and name not in spanned)


def _spanned(device_mesh: Any, place: Topology, ranks: Sequence[int]) -> set[str]:
    """The dims of the layout along which a DTensor's mesh has several ranks."""
    met = [place.mesh.coordinates(ranks.index(rank)) for rank in device_mesh.mesh.flatten().tolist() if rank in ranks]
    return {name for each in met for name, index in each.items() if index != met[0][name]}
