"""The sum of tensors over replicas: small ones travel together, and the order of additions may be fixed.

On a CPU a call returns when the sum is complete. On a device it may only have issued the work to the calling thread's
current stream.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

#: Bytes of one collective: enough that latency does not matter, and little beside a model.
BUCKET_BYTES = 25 * 2**20


class CollectiveError(Exception):
    """A collective failed; the cause is the error of torch.distributed."""


@contextmanager
def collective() -> Iterator[None]:
    """Wrap errors of torch.distributed in a `CollectiveError`, to tell them from errors of this rank alone."""
    try:
        yield
    except RuntimeError as error:
        raise CollectiveError from error


def sum_over(tensors: Iterable[Tensor], group: dist.ProcessGroup, *, in_order: bool = False) -> None:
    """Replace each tensor by its sum over the ranks of ``group``.

    Args:
        tensors: dense; the same on all ranks in number, order, shapes and dtypes.
        group: the ranks.
        in_order: add in the order of ranks, so that the bits of the result are defined; otherwise the backend chooses
            the order. It takes the memory of one bucket for each rank.

    Raises:
        CollectiveError: if a rank is gone, or the backend does not support a dtype.
    """
    for bucket in buckets(tensors):
        flat = _flat(bucket)
        if in_order:
            _sum_in_order(flat, group)
        else:
            with collective():
                dist.all_reduce(flat, group=group)
        _spread(flat, bucket)


def buckets(tensors: Iterable[Tensor], most_bytes: int = BUCKET_BYTES) -> Iterator[list[Tensor]]:
    """Cut ``tensors`` into lists of one device and dtype, each of ``most_bytes`` at most or of one larger tensor.

    Empty tensors are left out. The cut depends on order, shapes and dtypes alone, which are the same on all ranks.
    """
    filling: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    num_bytes: defaultdict[tuple[torch.device, torch.dtype], int] = defaultdict(int)
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        kind = (real.device, real.dtype)
        if kind in filling and num_bytes[kind] + real.nbytes > most_bytes:
            yield filling.pop(kind)
            num_bytes[kind] = 0
        filling.setdefault(kind, []).append(real)
        num_bytes[kind] += real.nbytes
    yield from filling.values()


def _flat(bucket: Sequence[Tensor]) -> Tensor:
    """``bucket`` as one dimension; a view of its tensor if it has only one and that is contiguous."""
    if len(bucket) == 1:
        return bucket[0].reshape(-1)
    return torch.cat([tensor.reshape(-1) for tensor in bucket])


def _spread(flat: Tensor, bucket: Sequence[Tensor]) -> None:
    """Write ``flat`` back."""
    if len(bucket) == 1 and flat.data_ptr() == bucket[0].data_ptr():
        return
    parts = torch.split(flat, [tensor.numel() for tensor in bucket])
    for tensor, part in zip(bucket, parts, strict=True):
        tensor.copy_(part.view(tensor.shape))


def _sum_in_order(flat: Tensor, group: dist.ProcessGroup) -> None:
    # Why not all_reduce? The backend chooses the order of its additions, and with it the bits. Why in pieces?
    # all_gather needs memory for a copy of each rank, and a single tensor may be larger than a bucket.
    for piece in torch.split(flat, max(1, BUCKET_BYTES // flat.element_size())):
        terms = [torch.empty_like(piece) for _ in range(group.size())]
        with collective():
            dist.all_gather(terms, piece, group=group)
        piece.copy_(terms[0])
        for other in terms[1:]:
            piece.add_(other)
