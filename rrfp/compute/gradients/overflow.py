"""Whether gradients have overflowed: the question that a scale on the loss is chosen by."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from rrfp.compute.gradients.layout import local_part


@torch.no_grad()
def has_overflow(parameters: Iterable[Tensor]) -> bool:
    """Whether an element of a gradient, of this rank's part of it, is inf or nan. Waits once for each device."""
    finite: dict[torch.device, list[Tensor]] = {}
    for part in _parts(parameters):
        largest = torch.linalg.vector_norm(part, math.inf)  # nan where an element is nan; needs no memory
        finite.setdefault(part.device, []).append(largest.isfinite())
    return not all(bool(torch.stack(each).all()) for each in finite.values())


@torch.no_grad()
def has_gradients(parameters: Iterable[Tensor]) -> bool:
    """Whether an element of a gradient, of this rank's part of it, is not zero."""
    return any(bool(part.count_nonzero()) for part in _parts(parameters))


def _parts(parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    """The memory of this rank's part of each gradient."""
    for parameter in parameters:
        if parameter.grad is None:
            continue
        part = local_part(parameter.grad)
        part = part._values() if part.is_sparse else part
        if part.numel():
            yield torch.view_as_real(part) if part.is_complex() else part
