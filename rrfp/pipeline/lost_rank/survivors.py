"""The ranks that are left after a loss, as a group of ``torch.distributed``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from rrfp import timeouts
from rrfp.compute.gradients.process_groups import all_gather_bytes
from rrfp.compute.gradients.reducer import parameters_once
from rrfp.errors import PipelineAborted
from rrfp.model.topology import Topology
from rrfp.pipeline.lost_rank.roll_call import Decision

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: Calls what makes a group, once all its ranks are here, and ends with a PipelineAborted if one of them is lost.
Join = Callable[[Callable[[], Any]], Any]

#: Makes the error of a group that a rank has not joined, or has left, from torch's.
Explain = Callable[[Exception], PipelineAborted]


class Survivors:
    """Of one pipeline, on one of them. All of them make the same calls, on the threads of their callers.

    ``torch_ranks`` are the numbers of all ranks in ``torch.distributed``. The group, over gloo, is made by the first
    call that needs it.
    """

    def __init__(
        self,
        decision: Decision,
        topology: Topology,
        torch_ranks: Sequence[int],
        join: Join,
        explain: Explain,
    ) -> None:
        #: The pipeline's ranks, ascending.
        self.ranks = decision.survivors
        self.decision = decision
        self._topology = topology
        self._torch_ranks = torch_ranks
        self._join = join
        self._explain = explain

    @cached_property
    def group(self) -> ProcessGroup:
        """Over the CPU; made when first read, by all of them at once."""
        # Without local synchronisation: its names depend on the groups that each rank has made before. Otherwise ranks
        # that are not in it, such as the lost ones, are not waited for.
        make = partial(
            dist.new_group,
            [self._torch_ranks[rank] for rank in self.ranks],
            timeout=timedelta(seconds=timeouts.SURVIVORS_S),
            backend="gloo",
        )
        with self._explained():
            group: ProcessGroup = self._join(make)
        return group

    @property
    def is_giver(self) -> bool:
        """Whether this rank is the first of its stage: it gives what all of them have."""
        return self._first_of(self._topology.stage) == self._topology.rank

    def gather(self, own: bytes) -> list[bytes]:
        """What each of them gives, in the order of ranks."""
        group = self.group
        with self._explained():
            return all_gather_bytes(own, group)

    @torch.no_grad()
    def pass_gradients(self, modules: Mapping[int, nn.Module]) -> None:
        """Those of a step that whole replicas have run, to the ranks of the others."""
        stage, whole = self._topology.stage, self.decision.whole
        of_stage = [rank for rank in self.ranks if self._topology.place_of(rank).stage == stage]
        has = {rank: self._topology.place_of(rank).replica in whole for rank in of_stage}
        source = next(rank for rank in of_stage if has[rank])
        takers = [rank for rank in of_stage if not has[rank]]
        parameters = [parameter for _, _, parameter in parameters_once(modules)]
        group, own = self.group, self._topology.rank
        if not parameters or (own != source and own not in takers):
            return
        with self._explained():
            if own == source:
                present = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
                sent = [present, *(_real(p.grad.cpu().contiguous()) for p in parameters if p.grad is not None)]
                for taker in takers:
                    for tensor in sent:
                        dist.send(tensor, self._torch_ranks[taker], group=group)
            else:
                _take(parameters, self._torch_ranks[source], group)

    def _first_of(self, stage: int) -> int:
        return next(rank for rank in self.ranks if self._topology.place_of(rank).stage == stage)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # torch names a connection
            raise self._explain(error) from error


def _take(parameters: Sequence[nn.Parameter], source: int, group: ProcessGroup) -> None:
    present = torch.empty(len(parameters), dtype=torch.uint8)
    dist.recv(present, source, group=group)
    for parameter, is_there in zip(parameters, present.tolist(), strict=True):
        if not is_there:
            continue
        gradient = torch.empty(parameter.shape, dtype=parameter.dtype)
        dist.recv(_real(gradient), source, group=group)
        parameter.grad = gradient.to(parameter.device)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
