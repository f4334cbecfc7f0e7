"""The norm of all gradients of a model over stages, shards and replicas, and their scaling by it.

The norm of a model is the norm of the norms of its parts, if every element is in exactly one part. So each rank
computes the norm of the gradients that it *counts*:

- of several replicas, which hold the same totals after their reduction, the first counts them;
- a plain tensor is the same on all ranks of a group, and member 0 counts it;
- every rank counts its shard of a ``DTensor``. Along the dims of its mesh where it is a copy, and along the group's
  dims that its mesh does not have, the ranks with coordinate 0 count it.

Norms are computed in float64 and combined in the order of ranks, so all ranks get the same number to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rrfp.compute.gradients.layout import as_dtensor, check_dense, local_part
from rrfp.compute.gradients.process_groups import crossed
from rrfp.compute.gradients.reducer import parameters_once
from rrfp.errors import ConfigError
from rrfp.model.graph import TextOf, numbered
from rrfp.model.topology import Topology
from rrfp.plain import flag, or_none


def check_norm(max_norm: Any, norm_type: Any, error_if_nonfinite: Any, foreach: Any) -> None:
    """Raise a ConfigError for an argument of ``clip_grad_norm_`` that is impossible."""
    flag("error_if_nonfinite", error_if_nonfinite)
    or_none(flag, "foreach", foreach)
    fields: tuple[tuple[str, Any, str], ...] = (
        ("max_norm", max_norm, "a number >= 0"),
        ("norm_type", norm_type, "a number above 0, or inf"),
    )
    for field, value, allowed in fields:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not value >= 0 or (field == "norm_type" and value == 0):
            raise ConfigError(f"{field} is {value!r}, must be {allowed}")


@torch.no_grad()
def local_norm(
    modules: Mapping[int, nn.Module],
    norm_type: float = 2.0,
    *,
    topology: Topology | None = None,
    ranks: Sequence[int] | None = None,
    skip: Collection[Tensor] = (),
    text_of: TextOf = numbered,
) -> float:
    """The norm of the gradients that this rank counts, all but those in ``skip``."""
    # A gradient that is a partial sum over a mesh becomes a copy: its ranks exchange their parts, so all of them must
    # make this call while no task runs, on the thread of the optimizer.
    skipped = {id(tensor) for tensor in skip}
    topology = Topology(0, 1) if topology is None else topology
    ranks = range(topology.world) if ranks is None else ranks
    parts: list[Tensor] = []
    for _, name, parameter in parameters_once(modules, text_of):
        if parameter.grad is None:
            continue
        if parameter.grad.layout is not torch.sparse_coo:
            check_dense(parameter.grad, name)
        parameter.grad = gradient = _without_partial_sums(parameter.grad)
        if id(parameter) not in skipped and _counts(gradient, topology, ranks):
            part = local_part(gradient)
            if part.is_sparse:  # several entries may have one index: their sum is the element
                part = part.coalesce().values()
            if part.numel():
                parts.append(part.abs() if part.is_complex() else part)
    return combined_norm(_norms(parts, norm_type), norm_type)


def _norms(parts: Sequence[Tensor], norm_type: float) -> list[float]:
    """The norm of each part. Waits once for each device."""
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, part in enumerate(parts):
        alike.setdefault((part.device, part.dtype), []).append(index)
    on_device: dict[torch.device, dict[int, Tensor]] = {}
    for (device, _), indices in alike.items():
        found = torch._foreach_norm([parts[index] for index in indices], norm_type, dtype=torch.float64)
        on_device.setdefault(device, {}).update(zip(indices, found, strict=True))
    norms = [0.0] * len(parts)
    for by_index in on_device.values():
        for index, norm in zip(by_index, torch.stack(list(by_index.values())).tolist(), strict=True):
            norms[index] = norm
    return norms


def combined_norm(norms: Sequence[float], norm_type: float = 2.0) -> float:
    if not norms:
        return 0.0
    return float(torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64), norm_type))


@torch.no_grad()
def clip(modules: Mapping[int, nn.Module], max_norm: float, norm: float) -> None:
    """Scale all gradients in place so that their norm is ``max_norm`` at most."""
    # As in `torch.nn.utils.clip_grad_norm_`. A nan must stay visible.
    factor = max_norm / (norm + 1e-6)
    if math.isinf(max_norm) or factor >= 1.0:
        return
    for _, _, parameter in parameters_once(modules):
        if parameter.grad is not None:
            part = local_part(parameter.grad)
            (part._values() if part.is_sparse else part).mul_(factor)


def _without_partial_sums(gradient: Tensor) -> Tensor:
    sharded = as_dtensor(gradient)
    if sharded is None or not any(placement.is_partial() for placement in sharded.placements):
        return gradient
    from torch.distributed.tensor import Replicate

    placements = [Replicate() if placement.is_partial() else placement for placement in sharded.placements]
    copies: Tensor = sharded.redistribute(placements=placements)
    return copies


def _counts(gradient: Tensor, topology: Topology, ranks: Sequence[int]) -> bool:
    """Whether this rank, of all that hold the same part of ``gradient``, counts it."""
    if topology.replica != 0:
        return False
    sharded = as_dtensor(gradient)
    mesh = topology.mesh
    coordinates = mesh.coordinates(topology.rank)
    spanned: set[str] = set()
    if sharded is not None:
        indices: Sequence[int] = sharded.device_mesh.get_coordinate() or ()
        if any(
            index and placement.is_replicate() for index, placement in zip(indices, sharded.placements, strict=True)
        ):
            return False
        spanned = crossed(sharded.device_mesh.mesh.flatten().tolist(), topology, ranks)
    return not any(coordinates[name] for name, _ in mesh.dims if name in mesh.coordinate and name not in spanned)


@torch.no_grad()
def has_overflow(parameters: Iterable[Tensor]) -> bool:
    """Whether a gradient has an inf or nan. Waits once for each device."""
    finite: dict[torch.device, list[Tensor]] = {}
    for part in _parts(parameters):
        largest = torch.linalg.vector_norm(part, math.inf)  # nan where an element is nan; needs no memory
        finite.setdefault(part.device, []).append(largest.isfinite())
    return not all(bool(torch.stack(each).all()) for each in finite.values())


@torch.no_grad()
def has_gradients(parameters: Iterable[Tensor]) -> bool:
    """Whether an element of a gradient is not zero."""
    return any(bool(part.count_nonzero()) for part in _parts(parameters))


def _parts(parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    for parameter in parameters:
        if parameter.grad is None:
            continue
        part = local_part(parameter.grad)
        part = part._values() if part.is_sparse else part
        if part.numel():
            yield torch.view_as_real(part) if part.is_complex() else part
