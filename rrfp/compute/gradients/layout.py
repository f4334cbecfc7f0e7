"""The layout of a gradient, and the part of it that this rank has.

A gradient is a plain tensor, or a ``DTensor`` of which every rank of a mesh has a local part. Sums over replicas add
local parts, element by element. That is correct if all replicas have the same layout and the full tensor is linear in
its parts, which holds for shards, copies and *partial sums*. Partial sums are common: under sequence parallelism the
gradient of a norm's weight stays one until its value is read.

Replicas compare layouts in every step, and not once: a gradient may be absent in one step, or placed otherwise. So a
layout is encoded as one integer, of which a single all-reduce finds the largest and the smallest over all replicas, and
a replica without a gradient makes zeros of the layout that the others have.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from rrfp.errors import StageError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

#: The layout of an absent gradient.
ABSENT = 0
#: An upper bound of all layouts.
TOO_LARGE = 1 << 62

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
#: Bits of one digit of a layout. The lowest digit is the dtype's index in `_DTYPES` plus 1; then follows one digit for
#: each dim of the mesh, of the values below.
_BITS = 5
#: Placed as the parameter is, a copy, a partial sum, or a shard along dim k (as `_SHARD` + k).
_SAME, _COPY, _PARTIAL, _SHARD = 0, 1, 2, 3


def as_dtensor(tensor: Tensor | None) -> DTensor | None:
    # Never imports torch.distributed.tensor, which takes seconds: without it no DTensor can exist.
    module = sys.modules.get("torch.distributed.tensor")
    return cast("DTensor", tensor) if module is not None and isinstance(tensor, module.DTensor) else None


def local_part(tensor: Tensor) -> Tensor:
    """The memory of ``tensor`` on this rank, without a history."""
    sharded = as_dtensor(tensor.detach())
    return tensor.detach() if sharded is None else sharded.to_local()


def encode(parameter: nn.Parameter, name: str) -> int:
    """The layout of the parameter's gradient, an integer; `ABSENT` if there is none."""
    gradient = parameter.grad
    if gradient is None or not parameter.requires_grad:
        return ABSENT
    check_dense(gradient, name)
    if gradient.dtype not in _DTYPES:
        raise StageError(f"{name} has a gradient of {gradient.dtype}, must be one of: {', '.join(map(str, _DTYPES))}")
    digits = [_DTYPES.index(gradient.dtype) + 1, *_placement_digits(parameter, gradient, name)]
    layout = sum(digit << index * _BITS for index, digit in enumerate(digits))
    if layout >= TOO_LARGE:
        raise StageError(f"{name} is spread over a mesh of {len(digits) - 1} dims, too many to compare its layout")
    return layout


def check_dense(gradient: Tensor, name: str) -> None:
    """Refuse a sparse gradient with a StageError that names the parameter."""
    if (layout := local_part(gradient).layout) is not torch.strided:
        raise StageError(f"{name} has a gradient of layout {layout}, must be dense (for an embedding: sparse=False)")


def zeros(parameter: nn.Parameter, layout: int) -> Tensor:
    mask = (1 << _BITS) - 1
    dtype, digits = _DTYPES[(layout & mask) - 1], layout >> _BITS
    part = torch.zeros_like(local_part(parameter), dtype=dtype)
    sharded = as_dtensor(parameter)
    if sharded is None:
        return part
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor import zeros as sharded_zeros

    mesh, placements = sharded.device_mesh, list(sharded.placements)
    for dim in range(mesh.ndim):
        digit = digits >> dim * _BITS & mask
        if digit != _SAME:
            placements[dim] = {_COPY: Replicate(), _PARTIAL: Partial()}.get(digit) or Shard(digit - _SHARD)
    if digits:  # the local part may have another size than the parameter's; a partial sum has the size of a copy
        sizes = [Replicate() if placement.is_partial() else placement for placement in placements]
        part = sharded_zeros(sharded.shape, dtype=dtype, device_mesh=mesh, placements=sizes).to_local()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=sharded.shape, stride=sharded.stride())


def _placement_digits(parameter: nn.Parameter, gradient: Tensor, name: str) -> list[int]:
    sharded, sharded_gradient = as_dtensor(parameter), as_dtensor(gradient)
    if sharded is None or sharded_gradient is None:
        return []
    pairs = zip(sharded_gradient.placements, sharded.placements, strict=True)
    return [_SAME if placement == expected else _digit(placement, name) for placement, expected in pairs]


def _digit(placement: Any, name: str) -> int:
    if placement.is_replicate():
        return _COPY
    if placement.is_partial() and placement.reduce_op == "sum":
        return _PARTIAL
    if placement.is_shard() and _SHARD + placement.dim < 1 << _BITS:
        return _SHARD + int(placement.dim)
    raise StageError(
        f"{name} has a gradient placed as {placement!r}, must be as the parameter, Replicate, Shard or Partial('sum')"
    )


@torch.no_grad()
def empty_totals(totals: dict[int, nn.Parameter]) -> None:
    """Zero the gradients in ``totals``, which others hold too, unless frozen."""
    for key, parameter in list(totals.items()):
        if parameter.requires_grad:
            del totals[key]
            if parameter.grad is not None:
                local_part(parameter.grad).zero_()


#: Bytes that are copied at once where memory does not begin at a word.
_SLICE_BYTES = 16 << 20


def checksum(tensor: Tensor) -> int:
    """48 bits computed from this rank's values of ``tensor``."""
    return checksums([tensor])[0]


@torch.no_grad()
def checksums(tensors: Iterable[Tensor]) -> list[int]:
    """`checksum` of each of ``tensors``, for one wait for their device."""
    sums = [_sum_of_words(tensor) for tensor in tensors]
    values: list[int] = torch.stack(sums).tolist() if sums else []
    # Why not the sum alone? Its upper bits hardly differ; the product spreads every bit of the sum over the bits kept.
    return [(value * 0x9E3779B97F4A7C15 & ((1 << 64) - 1)) >> 16 for value in values]


def _sum_of_words(tensor: Tensor) -> Tensor:
    """The sum of the bytes as 64-bit integers: exact in any order."""
    part = local_part(tensor).contiguous().view(-1)
    octets = (torch.view_as_real(part).view(-1) if part.is_complex() else part).view(torch.uint8)
    whole = octets.numel() // 8 * 8
    # Why not add integers of the values' size? torch would first copy all of them as int64.
    is_aligned = octets.storage_offset() % 8 == 0
    slices = (octets[:whole],) if is_aligned else map(torch.clone, torch.split(octets[:whole], _SLICE_BYTES))
    total = torch.zeros((), dtype=torch.int64, device=octets.device)
    for piece in slices:
        total += piece.view(torch.int64).sum()
    if whole < octets.numel():
        last = torch.zeros(8, dtype=torch.uint8, device=octets.device)
        last[: octets.numel() - whole] = octets[whole:]
        total += last.view(torch.int64)[0]
    return total
