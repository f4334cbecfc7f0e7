"""Ranks of one process on one loop, with messages that take time; `rrfp.sim.virtual.clock` runs the shell over it.

It is `inproc`, copies, bounded queues, lost peers and all, but for one thing: a message sent at t is filed with its
receiver at t + its latency, by a timer of the loop. Control messages take no time unless the latency says otherwise.

One clause of the transports' contract is broken on purpose, where a latency asks for it: messages of one channel whose
latencies differ may overtake each other, as the entries of a cost file do. The core keeps no order of arrivals, so
nothing above depends on it. With equal latencies every channel is a FIFO, and the conformance suite holds.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from rrfp.core.tasks import Kind
from rrfp.costs.table import CostTable
from rrfp.errors import ConfigError
from rrfp.transports.base import Message, MessageKind, TransportContext
from rrfp.transports.flow import Window
from rrfp.transports.inproc import InprocTransport, PeerEnd

#: Seconds that a message takes from one rank to another: (sender, receiver, message) -> finite, >= 0.
Latency = Callable[[int, int, Message], float]


def no_latency(rank: int, peer: int, message: Message) -> float:
    """Every message arrives at the instant at which it is sent."""
    return 0.0


def table_latency(costs: CostTable) -> Latency:
    """The latencies of a cost table: tensors as it says, everything else at once.

    Args:
        costs: of a chain of virtual stages; row v is the edge between v and v + 1, whichever way it is travelled.
    """
    rows = {Kind.F: costs.latency_forward.tolist(), Kind.B: costs.latency_backward.tolist()}

    def latency(rank: int, peer: int, message: Message) -> float:
        if message.kind is not MessageKind.OUTPUT or message.task is None:
            return 0.0
        kind, m, v = message.task
        seconds: float = rows[kind][v if kind is Kind.F else v - 1][m]
        return seconds

    return latency


class SimulatedTransport(InprocTransport):
    """Within one process, and messages take the time that a latency says: for virtual time.

    See the module's docstring. On its way a message counts as queued, so ``queue_bytes`` bounds it too.

    ``close`` leaves what is on its way to arrive; ``abort`` loses it.

    Args:
        context: who this rank is and whom it talks to.
        latency: how long each message takes.
    """

    name = "simulated"

    def __init__(self, context: TransportContext, latency: Latency = no_latency) -> None:
        super().__init__(context)
        self._latency = latency
        #: What is on its way: (arrival, number, file it). Numbers keep those of one instant in order on any loop.
        self._flights: list[tuple[float, int, Any]] = []
        self._launched = 0

    def abort(self) -> None:
        """Leave at once; to the peers this rank is lost, and so is what is on its way to them."""
        if not self._closed:
            self._flights.clear()
        super().abort()

    async def _find(self, peer: int, timeout_s: float) -> PeerEnd:
        end = await super()._find(peer, timeout_s)
        if end.home.loop is not asyncio.get_running_loop():
            raise ConfigError(f"rank {peer} is on another event loop; simulated joins the ranks of one: use inproc")
        return end

    def _deliver(self, peer: int, message: Message, window: Window, cost: int) -> None:
        seconds = self._latency(self.context.rank, peer, message)
        if not 0 <= seconds < math.inf:
            raise ConfigError(f"latency is {seconds} s for {message.task} to rank {peer}, must be finite and >= 0")
        arrive = partial(super()._deliver, peer, message, window, cost)
        if seconds == 0:
            arrive()
            return
        loop = asyncio.get_running_loop()
        arrival = loop.time() + seconds
        heapq.heappush(self._flights, (arrival, self._launched, arrive))
        self._launched += 1
        loop.call_at(arrival, self._land)

    def _land(self) -> None:
        """A timer of one of the messages fired: file the earliest. There are as many timers as messages."""
        if self._flights:  # or they were lost
            _, _, arrive = heapq.heappop(self._flights)
            arrive()
