"""The sum of gradients over data-parallel replicas, chunk by chunk, while other chunks still compute.

All replicas must begin their collectives in the same order, but they finish their chunks in different orders. So there
is one fixed order, the deepest chunk first because it usually ends first, and a chunk that ends early waits for its
turn. The calls block, or put work on a stream, so they have a lane of their own, beside that of the tasks.

On a device no stream has to wait for another: a chunk's gradients are final once its last task is *complete*, and the
step ends once the sums are. Only the caller's work is ordered by a fence.

Replicas may lack different gradients (an expert that no token of a replica chose): they first agree on the layouts, and
replace an absent gradient by zeros. Over several steps without ``zero_grad`` the total must count once, though every
replica holds it: before the next gradients are added, all replicas but the first replace it by zeros. So any change
that the caller makes to the total in between (clipping, scaling, zeroing, dropping) lasts, if it is the same on all
replicas.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rrfp import timeouts
from rrfp.compute.gradients.layout import (
    ABSENT,
    TOO_LARGE,
    as_dtensor,
    checksums,
    empty_totals,
    encode,
    local_part,
    zeros,
)
from rrfp.compute.gradients.module_checks import shard_again
from rrfp.compute.lanes.base import Lane
from rrfp.errors import StageError
from rrfp.model.graph import TextOf, numbered

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


#: Bytes of one collective: enough that latency does not matter, and little beside a model.
BUCKET_BYTES = 25 * 2**20


class CollectiveError(Exception):
    """A collective failed; the cause is the error of torch.distributed."""


@contextmanager
def collective() -> Iterator[None]:
    """Wrap errors of torch.distributed in a `CollectiveError`."""
    try:
        yield
    except RuntimeError as error:
        raise CollectiveError from error


def sum_over(tensors: Iterable[Tensor], group: dist.ProcessGroup, *, in_order: bool = False) -> None:
    """Replace each dense tensor by its sum over the ranks, with defined bits if ``in_order``."""
    for bucket in buckets(tensors):
        flat = _flat(bucket)
        if in_order:
            _sum_in_order(flat, group)
        else:
            with collective():
                dist.all_reduce(flat, group=group)
        _spread(flat, bucket)


def buckets(tensors: Iterable[Tensor], most_bytes: int = BUCKET_BYTES) -> Iterator[list[Tensor]]:
    """Cut ``tensors`` into lists of one device and dtype, alike on all ranks."""
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
    """``bucket`` as one dimension: a copy, or a view of one tensor."""
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


_Named = list[tuple[str, nn.Parameter]]

#: Stands for the checksum of a parameter that is frozen.
_FROZEN = -1
#: The most replicas that an error names of those that agree.
_MOST_NAMES = 4


class GradientReducer:
    """Sums the gradients of one rank's chunks over its counterparts in the other replicas."""

    # Of a DTensor it sums the local part. A parameter that several chunks share is summed once, with the last of them.

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        make_group: Callable[[], ProcessGroup],
        lane: Lane,
        *,
        replica: int,
        deterministic: bool = False,
        check_every: int = 0,
        names: Sequence[str] = (),
        text_of: TextOf = numbered,
    ) -> None:
        self._text_of = text_of
        self._names = names
        #: In each so many sums the replicas compare their parameters again, as before the first; 0: never.
        self._check_every = check_every
        #: Steps that summed, the current one included.
        self._sums = 0
        self._modules = dict(sorted(modules.items(), reverse=True))
        #: In the order of replicas, and for this object alone.
        self._make_group = make_group
        self._group: ProcessGroup | None = None
        self._replica = replica
        self._deterministic = deterministic
        #: Of the device that holds the gradients, so that a sum is complete when its call is.
        self._lane = lane
        #: For each chunk the parameters that it sums in this step, and the event of its turn.
        self._shares: dict[int, _Named] = {}
        self._turns: dict[int, asyncio.Event] = {}
        #: Parameters whose gradient is the total of all replicas, unless the caller has changed it since.
        self._totals: dict[int, nn.Parameter] = {}
        self._compared = False
        #: Held where gradients are made and when it is closed: from then on ``.grad`` belongs to the caller.
        self._making = threading.Lock()
        self._is_closed = False

    def start(self) -> None:
        """Start the lane. Called on the loop of `reduce`."""
        self._lane.start()

    async def join(self) -> None:
        """Make the group; returns when all its ranks have joined."""
        self._group = (await self._lane.enqueue(self._make_group)).result

    def open(self, reduces: bool) -> None:
        """Prepare for a training step. Called on the caller's thread."""
        if self._replica != 0:
            empty_totals(self._totals)  # replica 0 keeps them
        else:
            self._totals.clear()
        if reduces:
            self._sums += 1
            shard_again(self._modules.values())
            self._shares = shares(self._modules, self._text_of)
            self._turns = {v: asyncio.Event() for v in self._shares}
            self._next_turn()
            self._lane.fence()

    async def reduce(self, virtual_stage: int) -> None:
        """Sum the gradients of ``virtual_stage``, in its turn."""
        await self._turns[virtual_stage].wait()
        summing = self._lane.enqueue(partial(self._sum, virtual_stage))
        del self._turns[virtual_stage]
        self._next_turn()
        try:
            await summing
        except CollectiveError as error:
            # Why not raise at once? torch names a connection; meanwhile the control plane may name the rank that died.
            await asyncio.sleep(timeouts.COLLECTIVE_ERROR_S)
            raise error.__cause__ or error from None
        except StageError:
            raise
        except Exception:
            if self._lane.device is not None:  # as above, but the lane of the tasks names the task at fault
                await asyncio.sleep(timeouts.DEVICE_VERDICT_S)
            raise

    def close(self) -> None:
        """Stop without waiting for a running collective, after which no ``.grad`` is set. May be called twice."""
        with self._making:
            self._is_closed = True
        self._lane.close()

    def _next_turn(self) -> None:
        if (first := next(iter(self._turns.values()), None)) is not None:
            first.set()

    # On the lane's thread.

    @torch.no_grad()
    def _sum(self, virtual_stage: int) -> None:
        assert self._group is not None
        share = self._shares[virtual_stage]
        if not self._compared:
            self._compare_models()
        layouts = self._agree(share)
        present: list[nn.Parameter] = []
        with self._making:
            if self._is_closed:
                raise StageError("the pipeline was left")
            for (_, parameter), layout in zip(share, layouts, strict=True):
                if layout != ABSENT:
                    if parameter.grad is None:
                        parameter.grad = zeros(parameter, layout)
                    present.append(parameter)
            gradients = [local_part(parameter.grad) for parameter in present if parameter.grad is not None]
        # Why, if the step ends after the sum? It may fail before, and its caller then drops gradients that are still
        # being added.
        self._lane.adopt(gradients)
        sum_over(gradients, self._group, in_order=self._deterministic)
        self._totals.update((id(parameter), parameter) for parameter in present)

    def _agree(self, share: _Named) -> list[int]:
        """The layout of each gradient; a StageError if replicas differ."""
        if not share:
            return []
        layouts = [encode(parameter, name) for name, parameter in share]
        # One MAX-reduction compares them: it gives the largest layout and, by its distance to a bound, the smallest.
        # ABSENT is below both, so replicas without the gradient do not count.
        distances = [ABSENT if layout == ABSENT else TOO_LARGE - layout for layout in layouts]
        values = self._values(share)  # where they are compared in this step, they travel along
        reduced = self._largest([*layouts, *distances, *_both_signs(values)])
        largest, farthest = reduced[: len(layouts)], reduced[len(layouts) : 2 * len(layouts)]
        self._check_values(share, values, reduced[2 * len(layouts) :])
        for (name, _), high, low in zip(share, largest, farthest, strict=True):
            if high != ABSENT and high != TOO_LARGE - low:
                raise StageError(f"{name} has gradients of different dtypes or placements on the replicas")
        return largest

    def _values(self, share: _Named) -> list[int]:
        """Checksums of ``share`` if the replicas compare them in this step, else none."""
        # In the first step `_compare_models` has compared all of them, the frozen ones too.
        if not self._check_every or self._sums == 1 or (self._sums - 1) % self._check_every:
            return []
        values = iter(checksums(parameter for _, parameter in share if parameter.requires_grad))
        return [next(values) if parameter.requires_grad else _FROZEN for _, parameter in share]

    def _check_values(self, named: _Named, values: Sequence[int], reduced: Sequence[int]) -> None:
        """Compare checksums, given the largest of both signs."""
        for (name, _), own, high, low in zip(named, values, reduced, reduced[len(values) :], strict=False):
            if high != -low:  # so on all replicas
                raise StageError(self._difference(name, own))

    def _difference(self, name: str, value: int) -> str:
        """Which replicas have which value of a parameter, for an error."""
        assert self._group is not None
        own = torch.tensor([value], device=self._device())
        gathered = [torch.empty_like(own) for _ in range(self._group.size())]
        with collective():
            dist.all_gather(gathered, own, group=self._group)
        values = [int(each) for each in gathered]
        frozen = [r for r, each in enumerate(values) if each == _FROZEN]
        if frozen:
            learning = [r for r in range(len(values)) if r not in frozen]
            return f"{name} is frozen on {self._listed(frozen)} and not on {self._listed(learning)}: must be the same"
        (common, _), *_ = Counter(values).most_common(1)
        same = [r for r, each in enumerate(values) if each == common]
        others = [r for r, each in enumerate(values) if each != common]
        where = f"{name} has other values on {self._listed(others)} than on {self._listed(same)}"
        if self._sums == 1:
            return f"{where}: must start equal, from one checkpoint or one seed"
        return (
            f"{where}: must be the same, as the gradients are. Did one replica alone make an optimizer step, load "
            f"values, or have another learning rate? (check_replicas={self._check_every} compares them.)"
        )

    def _listed(self, replicas: Sequence[int]) -> str:
        """Their names, of many only the first."""
        names = [self._names[r] if self._names else f"replica {r}" for r in replicas[:_MOST_NAMES]]
        if len(replicas) > _MOST_NAMES:
            names.append(f"{len(replicas) - _MOST_NAMES} more")
        return ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else names[0]

    def _compare_models(self) -> None:
        """Compare the parameters of the replicas once, lest unrelated gradients be summed."""
        named = [pair for share in self._shares.values() for pair in share]
        text = "\n".join(_describe(*pair) for pair in named)
        digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
        high, low = self._largest([digest, -digest])
        if high != -low:
            raise StageError("the replicas of this stage differ in the names, shapes or dtypes of their parameters")
        values = checksums(parameter for _, parameter in named)
        self._check_values(named, values, self._largest(_both_signs(values)))
        self._compared = True

    def _largest(self, numbers: list[int]) -> list[int]:
        tensor = torch.tensor(numbers, dtype=torch.int64, device=self._device())
        with collective():
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)
        largest: list[int] = tensor.tolist()
        return largest

    def _device(self) -> torch.device:
        """The device of the parameters, on which the group's collectives work."""
        named = (parameter for share in self._shares.values() for _, parameter in share)
        return next((parameter.device for parameter in named), torch.device("cpu"))


def shares(modules: Mapping[int, nn.Module], text_of: TextOf = numbered) -> dict[int, _Named]:
    """The parameters that each chunk sums, the deepest first."""
    by_chunk: dict[int, _Named] = {v: [] for v in sorted(modules, reverse=True)}
    for v, name, parameter in parameters_once(modules, text_of):
        by_chunk[v].append((name, parameter))
    return by_chunk


def parameters_once(
    modules: Mapping[int, nn.Module], text_of: TextOf = numbered
) -> Iterator[tuple[int, str, nn.Parameter]]:
    """Every parameter once, with its display name, on the first virtual stage that has it."""
    seen: set[int] = set()
    for v, module in sorted(modules.items()):
        for name, parameter in module.named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield v, f"parameter {name!r} of {text_of(v)}", parameter


def _both_signs(values: Sequence[int]) -> list[int]:
    """What a MAX-reduction needs, to give the largest and the smallest of each."""
    return [*values, *(-value for value in values)]


def _describe(name: str, parameter: nn.Parameter) -> str:
    sharded = as_dtensor(parameter)
    return f"{name} {tuple(parameter.shape)} {parameter.dtype} {None if sharded is None else sharded.placements}"
