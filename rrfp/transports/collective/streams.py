"""Wires whose transfers run on a stream of a device: posted on a thread, complete when an event behind them is.

Why a thread that posts? A library may block the host in a post until the other end posts too. One thread for each edge
then delays that edge alone; the loop, or a thread for several edges, could wait for a post that waits behind it.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rrfp.transports.carried.wires import Done, EdgeName
from rrfp.transports.collective.threads import abort_at_exit, start_thread


class DeviceEvent(Protocol):
    """A mark in a stream."""

    def synchronize(self) -> None:
        """Wait until the device has passed it; raises the device's error."""


class StreamChannel(Protocol):
    """One end of a directed edge on a device: a stream, and what moves tensors on it. One thread uses it at a time."""

    def move(self, number: int, tensors: Sequence[Tensor]) -> None:
        """Issue the sends or receives of transfer ``number`` behind those issued before; may block the host."""

    def record(self) -> DeviceEvent:
        """An event behind all that was issued."""

    def abort(self) -> None:
        """End what was issued, at this end; may hang. Called once."""


@dataclass(slots=True)
class _Transfer:
    """Tensors stay referenced here until the device is done with them."""

    number: int
    tensors: Sequence[Tensor]
    done: Done
    event: DeviceEvent | None = None


class StreamWire:
    """See `Wire`."""

    def __init__(self, pipe: StreamChannel, edge: EdgeName) -> None:
        self._pipe = pipe
        self._edge = edge
        self._to_post: queue.SimpleQueue[_Transfer | None] = queue.SimpleQueue()
        self._posted: queue.SimpleQueue[_Transfer | None] = queue.SimpleQueue()
        self._aborted = False
        for name, serve in (("post", self._post), ("wait", self._wait)):
            start_thread(serve, f"rrfp-edge-{edge}-{name}")
        abort_at_exit(self)

    def post(self, number: int, tensors: Sequence[Tensor], done: Done) -> None:
        """See `Wire.post`."""
        self._to_post.put(_Transfer(number, tensors, done))

    def skip(self, number: int) -> bool:
        """See `Wire.skip`: false, since transfers are matched by their order alone."""
        return False

    def abort(self) -> None:
        """See `Wire.abort`. On a thread of its own: it may hang where the other end does not abort."""
        if self._aborted:
            return
        self._aborted = True
        self._to_post.put(None)
        start_thread(self._pipe.abort, f"rrfp-edge-{self._edge}-abort")

    def _post(self) -> None:
        while (transfer := self._to_post.get()) is not None:
            if not self._aborted:
                try:
                    self._pipe.move(transfer.number, transfer.tensors)
                    transfer.event = self._pipe.record()
                except Exception as error:
                    transfer.done(error)
                else:
                    self._posted.put(transfer)
            del transfer
        self._posted.put(None)

    def _wait(self) -> None:
        while (transfer := self._posted.get()) is not None:
            assert transfer.event is not None
            try:
                transfer.event.synchronize()
            except Exception as error:
                transfer.done(error)
            else:
                transfer.done(None)
            del transfer
