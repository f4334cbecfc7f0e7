"""How a gradient lies in memory, and the part of it that this rank has.

A gradient is a plain tensor, or a ``DTensor`` of which every rank of a mesh has a local part. What adds gradients over
replicas works on local parts, element by element: that is right as long as all replicas have them laid out in the same
way, and the whole is linear in its parts, which holds for shards, copies and *partial sums*. The latter are ordinary:
under sequence parallelism the gradient of a norm's weight is one until somebody asks for its value.

So that replicas can compare, a layout is one whole number, and one that lacks a gradient makes zeros by it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from rrfp.errors import StageError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

#: The number of no gradient.
ABSENT = 0
#: Above every layout's number.
TOO_LARGE = 1 << 62

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
#: A number is the dtype's place in `_DTYPES` plus 1, in so many bits, and above it as many for each dim of the mesh:
_BITS = 5
#: for a placement like the parameter's own, a copy, a partial sum, or a shard along dim k (as `_SHARD` + k).
_OWN, _COPY, _PARTIAL, _SHARD = 0, 1, 2, 3


def as_dtensor(tensor: Tensor | None) -> DTensor | None:
    """``tensor`` if it is a DTensor, else None.

    Where nobody has imported ``torch.distributed.tensor`` there is none; importing it takes seconds.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return cast("DTensor", tensor) if module is not None and isinstance(tensor, module.DTensor) else None


def local_part(tensor: Tensor) -> Tensor:
    """The memory of ``tensor`` on this rank, without a history: a change of it is a change of ``tensor``."""
    sharded = as_dtensor(tensor.detach())
    return tensor.detach() if sharded is None else sharded.to_local()


def encode(parameter: nn.Parameter, name: str) -> int:
    """The layout of the parameter's gradient as a number below `TOO_LARGE`.

    Args:
        parameter: whose gradient it is; a frozen one counts as without.
        name: how people call it.

    Raises:
        StageError: if the gradient is sparse, or of a kind that cannot be added part by part.
    """
    gradient = parameter.grad
    if gradient is None or not parameter.requires_grad:
        return ABSENT
    check_dense(gradient, name)
    if gradient.dtype not in _DTYPES:
        raise StageError(f"{name} has a gradient of {gradient.dtype}, must be one of: {', '.join(map(str, _DTYPES))}")
    digits = [_DTYPES.index(gradient.dtype) + 1, *_placement_digits(parameter, gradient, name)]
    number = sum(digit << place * _BITS for place, digit in enumerate(digits))
    if number >= TOO_LARGE:
        raise StageError(f"{name} is spread over a mesh of {len(digits) - 1} dims, too many to compare its layout")
    return number


def check_dense(gradient: Tensor, name: str) -> None:
    """Refuse a sparse gradient.

    Raises:
        StageError: naming the parameter.
    """
    if (found := local_part(gradient).layout) is not torch.strided:
        raise StageError(f"{name} has a gradient of layout {found}, must be dense (for an embedding: sparse=False)")


#: Integers by their size in bytes.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def zeros(parameter: nn.Parameter, number: int) -> Tensor:
    """A gradient of zeros for ``parameter``, laid out as `encode` told on another replica."""
    mask = (1 << _BITS) - 1
    dtype, digits = _DTYPES[(number & mask) - 1], number >> _BITS
    part = torch.zeros_like(local_part(parameter), dtype=dtype)
    sharded = as_dtensor(parameter)
    if sharded is None:
        return part
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor import zeros as sharded_zeros

    mesh, placements = sharded.device_mesh, list(sharded.placements)
    for dim in range(mesh.ndim):
        digit = digits >> dim * _BITS & mask
        if digit != _OWN:
            placements[dim] = {_COPY: Replicate(), _PARTIAL: Partial()}.get(digit) or Shard(digit - _SHARD)
    if digits:  # a part of another size; a partial sum has the size of a copy
        sizes = [Replicate() if placement.is_partial() else placement for placement in placements]
        part = sharded_zeros(sharded.shape, dtype=dtype, device_mesh=mesh, placements=sizes).to_local()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=sharded.shape, stride=sharded.stride())


def _placement_digits(parameter: nn.Parameter, gradient: Tensor, name: str) -> list[int]:
    whole, sharded = as_dtensor(parameter), as_dtensor(gradient)
    if whole is None or sharded is None:
        return []
    pairs = zip(sharded.placements, whole.placements, strict=True)
    return [_OWN if placement == own else _digit(placement, name) for placement, own in pairs]


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
    """Put zeros in place of gradients that are totals which another rank, or copy, holds too, and forget them.

    A frozen parameter's waits until it thaws.
    """
    for key, parameter in list(totals.items()):
        if parameter.requires_grad:
            del totals[key]
            if parameter.grad is not None:
                local_part(parameter.grad).zero_()


@torch.no_grad()
def checksum(tensor: Tensor) -> int:
    """A number of 48 bits that this rank's values of ``tensor`` decide; equal values have equal ones."""
    part = local_part(tensor).contiguous().view(-1)
    whole = torch.view_as_real(part).view(-1) if part.is_complex() else part
    bits = whole.view(_INTEGERS[whole.element_size()])
    # The product spreads every bit of the sum over the upper ones, which are kept.
    mixed = int(bits.sum(dtype=torch.int64)) * 0x9E3779B97F4A7C15 & ((1 << 64) - 1)
    return mixed >> 16
