"""The sum of gradients over data-parallel replicas, chunk by chunk, while other chunks still compute.

A collective works only if all replicas begin it at the same point of one sequence, but replicas finish their chunks in
different orders. So there is one agreed order, deeper chunks first since those are usually done first, and a chunk that
is done early waits for its turn. One thread makes all the calls, which block; it is a daemon and nobody joins it.

Which parameters have a gradient may differ (an expert that no token of a replica chose): the replicas first agree on
that, and zeros stand in. Over several steps without ``zero_grad`` the total must count once, though every replica holds
it: before the next gradients are added to it, all replicas but the first put zeros in its place. Whatever the caller
did to the total in between (clipped, scaled, zeroed, dropped it), the same on all replicas, thus stays done.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from rrfp.compute.gradients.buckets import CollectiveError, collective, sum_over
from rrfp.compute.gradients.layout import (
    ABSENT,
    TOO_LARGE,
    as_dtensor,
    checksum,
    empty_totals,
    encode,
    local_part,
    zeros,
)
from rrfp.compute.lanes.thread import ThreadLane
from rrfp.core import timeouts
from rrfp.errors import StageError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: Parameters with their names.
_Named = list[tuple[str, nn.Parameter]]


class GradientReducer:
    """Sums the gradients of one rank's chunks with those of the same rank in the other replicas.

    A DTensor's local part is summed. A parameter that several chunks share is summed once, with the last of them.

    Args:
        modules: the chunks of the rank, by virtual stage.
        make_group: makes the group of the rank and its likes in the other replicas, in the order of replicas; may
            block. Nobody else may use it.
        replica: which replica this rank belongs to.
        deterministic: add in the order of replicas, so that the result's bits do not depend on the backend.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        make_group: Callable[[], ProcessGroup],
        *,
        replica: int,
        deterministic: bool = False,
    ) -> None:
        self._modules = dict(sorted(modules.items(), reverse=True))
        self._make_group = make_group
        self._group: ProcessGroup | None = None
        self._replica = replica
        self._deterministic = deterministic
        self._lane = ThreadLane("rrfp-gradients")
        #: What each chunk sums in this step, and what opens when its turn comes.
        self._shares: dict[int, _Named] = {}
        self._turns: dict[int, asyncio.Event] = {}
        #: Parameters whose gradient is, or was when last seen, the total.
        self._totals: dict[int, nn.Parameter] = {}
        self._compared = False

    def start(self) -> None:
        """Start the thread. Called on the loop of `reduce`."""
        self._lane.start()

    async def join(self) -> None:
        """Make the group; returns when all its ranks are here. Once, before the first step."""
        self._group = (await self._lane.enqueue(self._make_group)).result

    def open(self, reduces: bool) -> None:
        """A training step is about to begin. Called on the caller's thread, between steps.

        Args:
            reduces: whether `reduce` will be called for every chunk, or, the same on all replicas, for none.
        """
        if self._replica != 0:
            empty_totals(self._totals)  # replica 0 has them too
        else:
            self._totals.clear()
        if reduces:
            self._shares = shares(self._modules)
            self._turns = {v: asyncio.Event() for v in self._shares}
            self._next_turn()

    async def reduce(self, virtual_stage: int) -> None:
        """Sum the gradients of ``virtual_stage``, once all tasks of it are done and its turn has come.

        Raises:
            StageError: if a gradient cannot be summed, or the replicas' models differ.
            Exception: whatever a collective raised, after `COLLECTIVE_ERROR_S`.
        """
        await self._turns[virtual_stage].wait()
        summing = self._lane.enqueue(partial(self._sum, virtual_stage))
        del self._turns[virtual_stage]
        self._next_turn()
        try:
            await summing
        except CollectiveError as error:
            await asyncio.sleep(timeouts.COLLECTIVE_ERROR_S)
            raise error.__cause__ or error from None

    def close(self) -> None:
        """Sum nothing more. Never waits for a running collective. May be called twice."""
        self._lane.close()

    def _next_turn(self) -> None:
        if (first := next(iter(self._turns.values()), None)) is not None:
            first.set()

    # On the thread.

    @torch.no_grad()
    def _sum(self, virtual_stage: int) -> None:
        assert self._group is not None
        share = self._shares[virtual_stage]
        if not self._compared:
            self._compare_models()
        present: list[nn.Parameter] = []
        for (_, parameter), number in zip(share, self._agree(share), strict=True):
            if number != ABSENT:
                if parameter.grad is None:
                    parameter.grad = zeros(parameter, number)
                present.append(parameter)
        gradients = (local_part(parameter.grad) for parameter in present if parameter.grad is not None)
        sum_over(gradients, self._group, in_order=self._deterministic)
        self._totals.update((id(parameter), parameter) for parameter in present)

    def _agree(self, share: _Named) -> list[int]:
        """How each gradient is laid out on the replicas that have it.

        Raises:
            StageError: if they do not all have it in the same way.
        """
        if not share:
            return []
        own = [encode(parameter, name) for name, parameter in share]
        # The largest, and the smallest as the largest difference to a bound; absence is below both.
        told = own + [ABSENT if number == ABSENT else TOO_LARGE - number for number in own]
        found = self._largest(told)
        largest, smallest = found[: len(own)], found[len(own) :]
        for (name, _), high, low in zip(share, largest, smallest, strict=True):
            if high != ABSENT and high != TOO_LARGE - low:
                raise StageError(f"{name} has gradients of different dtypes or placements on the replicas")
        return largest

    def _compare_models(self) -> None:
        """Make sure that the replicas have the same parameters, or sums of this and that would be formed.

        Raises:
            StageError: if not, or if a parameter has other values.
        """
        named = [each for share in self._shares.values() for each in share]
        text = "\n".join(_describe(*each) for each in named)
        digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
        high, low = self._largest([digest, -digest])
        if high != -low:
            raise StageError("the replicas of this stage differ in the names, shapes or dtypes of their parameters")
        values = [checksum(parameter) for _, parameter in named]
        found = self._largest([*values, *(-value for value in values)])
        for (name, _), high, low in zip(named, found, found[len(values) :], strict=False):
            if high != -low:
                raise StageError(
                    f"{name} has other values on this rank or another replica's: must start equal, from one checkpoint "
                    "or one seed"
                )
        self._compared = True

    def _largest(self, numbers: list[int]) -> list[int]:
        """The largest of each number over the replicas."""
        import torch.distributed as dist

        tensor = torch.tensor(numbers, dtype=torch.int64, device=self._device())
        with collective():
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)
        largest: list[int] = tensor.tolist()
        return largest

    def _device(self) -> torch.device:
        """Where the group's collectives work: where the parameters are."""
        named = (parameter for share in self._shares.values() for _, parameter in share)
        return next((parameter.device for parameter in named), torch.device("cpu"))


def shares(modules: Mapping[int, nn.Module]) -> dict[int, _Named]:
    """The parameters that each chunk sums, the deepest chunk first; each parameter once, with the last chunk of it."""
    found: dict[int, _Named] = {}
    seen: set[int] = set()
    for v, module in sorted(modules.items()):
        found[v] = [(name, parameter) for name, parameter in named_parameters(v, module) if id(parameter) not in seen]
        seen.update(id(parameter) for _, parameter in found[v])
    return dict(sorted(found.items(), reverse=True))


def named_parameters(virtual_stage: int, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Each parameter of ``module`` once, with what people call it."""
    for name, parameter in module.named_parameters():
        yield f"parameter {name!r} of virtual stage {virtual_stage}", parameter


def _describe(name: str, parameter: nn.Parameter) -> str:
    sharded = as_dtensor(parameter)
    return f"{name} {tuple(parameter.shape)} {parameter.dtype} {None if sharded is None else sharded.placements}"
