"""Process groups over gloo, for tensors in host memory: transport `collective` on a CPU, for tests alone.

gloo's transfers offer no future, and do not look complete before a thread waits for them (torch 2.13). Its groups
cannot be aborted; but a wait that exceeds its time limit closes the group's connection, which ends all other waits at
both ends: `GlooGroup.abort` makes use of that.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from rrfp import timeouts
from rrfp.compute.lanes.thread import ThreadLane
from rrfp.devices.base import CopyLane
from rrfp.transports.base import TransportContext
from rrfp.transports.collective.channel import RankPair
from rrfp.transports.collective.transport import CollectiveTransport
from rrfp.transports.wire.header_checks import TensorSpec
from rrfp.transports.wire.tensor_bytes import as_byte_tensor

#: gloo's tags have 31 bits. The last one is no transfer's.
_TAGS = (1 << 31) - 1

_TRANSFER = timedelta(seconds=timeouts.TRANSFER_S)


def over_gloo(context: TransportContext) -> CollectiveTransport:
    """One rank's `collective` over gloo, within a host."""
    return CollectiveTransport(context, GlooBackend(context.rank, "127.0.0.1"))


class GlooGroup:
    """See `PairGroup`. The lane waits for each transfer."""

    def __init__(self, group: Any, pair: RankPair, *, is_source: bool) -> None:
        self.lane: CopyLane = ThreadLane(f"rrfp-gloo-{pair}")
        self._group = group
        self._peer = 1 if is_source else 0
        self._begin = group.send if is_source else group.recv
        self._name = f"rrfp-gloo-{pair}-abort"

    def move(self, number: int, tensors: Sequence[Tensor]) -> None:
        """See `PairGroup.move`. The number is the tag, so a transfer that one end skips does not shift those after."""
        pieces = [as_byte_tensor(tensor) for tensor in tensors]
        for work in [self._begin([piece], self._peer, number % _TAGS) for piece in pieces]:
            work.wait(_TRANSFER)

    def abort(self) -> None:
        """See `PairGroup.abort`. May be called twice."""
        if self._group is not None:
            # Not a daemon: the end of the process must wait for what calls C++.
            threading.Thread(target=_close_connection, args=(self._group, self._peer), name=self._name).start()
        self._group = self._begin = None


def _close_connection(group: Any, peer: int) -> None:
    """Close the connection of a group of two, which ends all that waits for it: by a receive that has no time."""
    with suppress(RuntimeError):
        group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], peer, _TAGS).wait(timedelta(milliseconds=1))


class GlooBackend:
    """See `Backend`."""

    def __init__(self, rank: int, address: str) -> None:
        self._rank = rank
        self._address = address

    def holds(self, tensor: Tensor) -> bool:
        return tensor.is_cpu

    def empty(self, spec: TensorSpec) -> Tensor:
        return torch.empty(spec.shape, dtype=spec.dtype, device="cpu")

    def connect(self, pair: RankPair, store: Any, timeout_s: float) -> GlooGroup:
        from torch.distributed import ProcessGroupGloo

        groups: Any = ProcessGroupGloo  # torch's own types lack the options
        options = groups._Options()
        options._devices = [groups.create_device(hostname=self._address)]
        options._timeout = timedelta(seconds=timeout_s)
        is_source = self._rank == pair.source
        return GlooGroup(groups(store, int(not is_source), 2, options), pair, is_source=is_source)
