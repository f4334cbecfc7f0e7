"""The sum over replicas of some tensors: many small ones travel as one, and in a fixed order where that is asked for.

Blocks until the sum is there, on whatever thread it is called.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

#: What travels at once, in bytes: enough that latency does not matter, and little beside a model.
BUCKET_BYTES = 25 * 2**20


class CollectiveError(Exception):
    """A collective raised; the cause says what."""


@contextmanager
def collective() -> Iterator[None]:
    """What a call of torch.distributed raises in here is told from errors of this rank alone.

    Raises:
        CollectiveError: if it raises.
    """
    try:
        yield
    except RuntimeError as error:
        raise CollectiveError from error


def sum_over(tensors: Iterable[Tensor], group: dist.ProcessGroup, *, in_order: bool = False) -> None:
    """Replace each tensor by its sum over the ranks of ``group``.

    Raises:
        CollectiveError: if a rank is gone, or a backend does not know a dtype.

    Args:
        tensors: dense; alike on all ranks in number, order, shapes and dtypes.
        group: the ranks.
        in_order: add in the order of ranks in the group, so that the bits of the result are defined; otherwise as the
            backend likes. It costs the memory of one bucket for each rank.
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
    """Cut into lists of one device and dtype, each of ``most_bytes`` at most or one tensor that is larger.

    Empty tensors are left out. The cut depends only on what all ranks have in common, and on no order but theirs.
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
    """All of ``bucket`` as one row; the memory of the tensor itself where it is a single one without gaps."""
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
    # In pieces, or a large tensor would need room for as many copies of itself as there are ranks.
    for piece in torch.split(flat, max(1, BUCKET_BYTES // flat.element_size())):
        of_all = [torch.empty_like(piece) for _ in range(group.size())]
        with collective():
            dist.all_gather(of_all, piece, group=group)
        piece.copy_(of_all[0])
        for other in of_all[1:]:
            piece.add_(other)
