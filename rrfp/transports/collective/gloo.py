"""Wires over gloo, for tensors in host memory: one process group of two ranks for each edge, over tcp.

gloo's transfers offer no future, and do not look complete before a thread waits for them (torch 2.13): so one thread
for each wire waits for them in order. Its groups cannot be aborted; but a wait that exceeds its time limit closes the
group's connection, which ends all other waits at both ends: `GlooWire.abort` makes use of that.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rrfp import timeouts
from rrfp.transports.carried.wires import Done, EdgeName
from rrfp.transports.collective.threads import abort_at_exit, start_thread
from rrfp.transports.header_checks import TensorSpec
from rrfp.transports.tensor_bytes import as_byte_tensor

#: gloo's tags have 31 bits. The last one is no transfer's.
_TAGS = (1 << 31) - 1

_TRANSFER = timedelta(seconds=timeouts.TRANSFER_S)


@dataclass(slots=True)
class _Posted:
    """A transfer: gloo's works, the memory that they use, and who waits."""

    works: list[Any]
    pieces: list[Tensor]
    done: Done


class GlooWire:
    """See `Wire`."""

    def __init__(self, group: Any, edge: EdgeName, *, is_source: bool) -> None:
        self._group = group
        self._peer = 1 if is_source else 0
        self._begin = group.send if is_source else group.recv
        self._posted: queue.SimpleQueue[_Posted | None] = queue.SimpleQueue()
        self._aborted = False
        self._name = f"rrfp-edge-{edge}"
        start_thread(self._wait, self._name)
        abort_at_exit(self)

    def post(self, number: int, tensors: Sequence[Tensor], done: Done) -> None:
        """See `Wire.post`. The number is the tag, so a transfer that one end skips does not shift those after it."""
        pieces = [as_byte_tensor(tensor) for tensor in tensors]
        try:
            works = [self._begin([piece], self._peer, number % _TAGS) for piece in pieces]
        except RuntimeError as error:
            done(error)
        else:
            self._posted.put(_Posted(works, pieces, done))

    def skip(self, number: int) -> bool:
        """See `Wire.skip`: true, by the tags."""
        return True

    def abort(self) -> None:
        """See `Wire.abort`. The thread ends by itself."""
        if self._aborted:
            return
        self._aborted = True
        self._posted.put(None)
        start_thread(partial(_close_connection, self._group, self._peer), f"{self._name}-abort")
        self._group = self._begin = None

    def _wait(self) -> None:
        while (posted := self._posted.get()) is not None:
            error = None
            try:
                for work in posted.works:
                    work.wait(_TRANSFER)
            except Exception as raised:
                error = raised
            posted.works.clear()
            posted.done(error)
            del posted, error


def _close_connection(group: Any, peer: int) -> None:
    """Close the connection of a group of two, which ends all that waits for it: by a receive that has no time."""
    with suppress(RuntimeError):
        group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], peer, _TAGS).wait(timedelta(milliseconds=1))


class GlooBackend:
    """See `Backend`."""

    name = "gloo"

    def __init__(self, rank: int, address: str) -> None:
        self._rank = rank
        self._address = address

    def holds(self, tensor: Tensor) -> bool:
        """See `Backend.holds`."""
        return tensor.is_cpu

    def empty(self, spec: TensorSpec) -> Tensor:
        """See `Backend.empty`."""
        return torch.empty(spec.shape, dtype=spec.dtype, device="cpu")

    def connect(self, edge: EdgeName, store: Any, timeout_s: float) -> GlooWire:
        """See `Backend.connect`."""
        from torch.distributed import ProcessGroupGloo

        groups: Any = ProcessGroupGloo  # torch's own types lack the options
        options = groups._Options()
        options._devices = [groups.create_device(hostname=self._address)]
        options._timeout = timedelta(seconds=timeout_s)
        is_source = self._rank == edge.source
        return GlooWire(groups(store, int(not is_source), 2, options), edge, is_source=is_source)

    def close(self) -> None:
        """See `Backend.close`: wires share nothing."""
