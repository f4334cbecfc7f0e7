"""Ranks of one process on one loop, with messages that take time; `rrfp.lab.virtual_clock` runs the shell over it.

It differs from `inproc` in one point: a message sent at t reaches its receiver's inbox at t + its latency, by a timer
of the loop. Copies, bounded queues and lost peers are the same.

Latencies that differ break one clause of the transports' contract on purpose: messages of one channel may then overtake
each other, as the entries of a cost file do. The core does not depend on the order of arrivals. With equal latencies
every channel is a FIFO, and the conformance suite holds.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from rrfp.costs.table import CostTable, message_times
from rrfp.errors import ConfigError
from rrfp.transports.base import Message, MessageKind, TransportContext
from rrfp.transports.inproc import InprocTransport, PeerEnd
from rrfp.transports.links.flow import Window

#: Seconds of a message between two ranks: (sender, receiver, message) -> finite, >= 0.
Latency = Callable[[int, int, Message], float]


def no_latency(rank: int, peer: int, message: Message) -> float:
    """Zero: every message arrives at the instant at which it is sent."""
    return 0.0


def table_latency(costs: CostTable) -> Latency:
    """A cost table's latencies of outputs; zero for other messages."""
    times = message_times(costs)

    def latency(rank: int, peer: int, message: Message) -> float:
        if message.kind is not MessageKind.OUTPUT or message.task is None:
            return 0.0
        kind, m, v = message.task
        return times[kind][v][peer][m]

    return latency


class SimulatedTransport(InprocTransport):
    """Between ranks of one process and loop, with a latency for each message: for virtual time.

    A message in flight counts as queued, so ``queue_bytes`` bounds it too. After ``close`` messages in flight still
    arrive; ``abort`` loses them.
    """

    name = "simulated"

    def __init__(self, context: TransportContext, latency: Latency = no_latency) -> None:
        super().__init__(context)
        self._latency = latency
        #: Messages in flight: (arrival, number, deliver). The numbers order messages that arrive at one instant.
        self._in_flight: list[tuple[float, int, Any]] = []
        self._num_sent = 0

    def abort(self) -> None:
        """Leave at once; the peers see this rank as lost, and its messages in flight are dropped."""
        if not self._closed:
            self._in_flight.clear()
        super().abort()

    async def _connect(self, peer: int, timeout_s: float) -> PeerEnd:
        end = await super()._connect(peer, timeout_s)
        if end.home.loop is not asyncio.get_running_loop():
            raise ConfigError(f"rank {peer} is on another event loop; simulated joins the ranks of one: use inproc")
        return end

    def _deliver(self, peer: int, message: Message, window: Window, cost: int) -> None:
        seconds = self._latency(self.context.rank, peer, message)
        if not 0 <= seconds < math.inf:
            raise ConfigError(f"latency is {seconds} s for {message.task} to rank {peer}, must be finite and >= 0")
        deliver = partial(super()._deliver, peer, message, window, cost)
        if seconds == 0:
            deliver()
            return
        loop = asyncio.get_running_loop()
        arrival = loop.time() + seconds
        heapq.heappush(self._in_flight, (arrival, self._num_sent, deliver))
        self._num_sent += 1
        loop.call_at(arrival, self._deliver_earliest)

    def _deliver_earliest(self) -> None:
        # Timers of one instant may fire in any order, so a timer delivers the earliest message instead of its own.
        # There are as many timers as messages.
        if self._in_flight:  # else they were dropped by abort
            _, _, deliver = heapq.heappop(self._in_flight)
            deliver()
