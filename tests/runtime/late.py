"""A network that is slow now and then, on each rank at other times."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict

from rrfp.transports.base import Channel, Message, TransportContext
from rrfp.transports.zmq.transport import ZmqTransport

#: How late messages are in the mean, in seconds: about what a task takes.
LATE_S = 0.015


class Late(ZmqTransport):
    """Every third message with tensors leaves late, on each rank another one; those behind it wait."""

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        self._draws = random.Random(context.rank)
        self._turns: defaultdict[tuple[int, Channel], asyncio.Lock] = defaultdict(asyncio.Lock)

    async def send(self, peer: int, message: Message) -> None:
        if message.channel is Channel.CONTROL:
            await super().send(peer, message)
            return
        async with self._turns[peer, message.channel]:
            if self._draws.random() < 1 / 3:
                await asyncio.sleep(self._draws.expovariate(1 / LATE_S))
            await super().send(peer, message)
