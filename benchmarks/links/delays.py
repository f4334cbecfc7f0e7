"""Links that take long: a transport, and torch's sends, whose messages between some ranks arrive later.

The sender goes on at once, as with a wire: a delayed message takes no time of anyone's but its own.
"""

from __future__ import annotations

import asyncio
import heapq
import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining import schedules

from rrfp.errors import FrameError, PeerLostError, RrfpError, TransportClosedError
from rrfp.transports.base import Message, Transport, TransportContext, TransportStatistics
from rrfp.transports.registry import create_transport


class Delays:
    """The slow links: each joins a rank with the next, and takes ``seconds`` each way.

    ``everywhere``: seconds between any two ranks, until `set` is called.
    """

    def __init__(self, everywhere: float = 0.0) -> None:
        self._links: frozenset[tuple[int, int]] | None = None
        self._seconds = everywhere

    def set(self, links: Sequence[int], seconds: float) -> None:
        """From now on these links are slow, and no others."""
        self._links, self._seconds = frozenset((rank, rank + 1) for rank in links), seconds

    def between(self, rank: int, peer: int) -> float:
        """Seconds from one to the other."""
        is_slow = self._links is None or (min(rank, peer), max(rank, peer)) in self._links
        return self._seconds if is_slow else 0.0


class DelayingTransport(Transport):
    """The default transport; what peers over slow links send is received later, in its order."""

    name = "delaying"

    def __init__(self, context: TransportContext, delays: Delays) -> None:
        super().__init__(context)
        self._inner = create_transport("auto", context)
        self._delays = delays
        self._received = asyncio.Queue[Message | RrfpError]()
        #: By sender: what is under way, and when its last message is due.
        self._under_way: dict[int, deque[Message | RrfpError]] = defaultdict(deque)
        self._due: dict[int, float] = defaultdict(float)
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Connect to every peer."""
        await self._inner.start()
        self._reading = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        while True:
            try:
                entry: Message | RrfpError = await self._inner.receive()
            except TransportClosedError as error:
                self._received.put_nowait(error)
                return
            except (FrameError, PeerLostError) as error:
                entry = error
            sender = entry.sender if isinstance(entry, Message) else getattr(entry, "peer", None)
            self._hand_over(-1 if sender is None else sender, entry)

    def _hand_over(self, sender: int, entry: Message | RrfpError) -> None:
        loop = asyncio.get_running_loop()
        due = max(self._due[sender], loop.time() + self._delays.between(self.context.rank, sender))
        self._due[sender] = due
        self._under_way[sender].append(entry)
        if due <= loop.time():
            self._arrive(sender)
        else:
            loop.call_at(due, self._arrive, sender)

    def _arrive(self, sender: int) -> None:
        # Timers of one instant fire in any order; so each hands over the first message that is under way.
        self._received.put_nowait(self._under_way[sender].popleft())

    async def send(self, peer: int, message: Message) -> None:
        """As the default transport."""
        await self._inner.send(peer, message)

    async def receive(self) -> Message:
        """The next message that is due."""
        entry = await self._received.get()
        if isinstance(entry, RrfpError):
            raise entry
        return entry

    async def close(self) -> None:
        """Deliver, and free everything."""
        await self._inner.close()
        await self._end()

    def abort(self) -> None:
        """Free everything now."""
        self._inner.abort()
        if self._reading is not None:
            self._reading.cancel()

    async def _end(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    def statistics(self) -> TransportStatistics:
        """Those of the default transport."""
        return self._inner.statistics()


class _Sent(dist.Work):
    """A send that was handed to the wire."""

    def wait(self, *_: Any) -> bool:
        """Nothing to wait for: its memory does not change."""
        return True


class DelayedSends:
    """Delays what torch's schedules send over slow links, in its order; `install` puts it in place."""

    def __init__(self, rank: int, delays: Delays) -> None:
        self._rank = rank
        self._delays = delays
        self._batch = schedules._batch_p2p
        #: (due, number, op).
        self._waiting: list[tuple[float, int, dist.P2POp]] = []
        self._numbers = count()
        self._changed = threading.Condition()
        self._works: list[Any] = []

    def install(self) -> None:
        """From now on the sends and receives of torch's schedules go through here."""
        schedules._batch_p2p = self.batch
        threading.Thread(target=self._send, name="delayed-sends", daemon=True).start()

    def batch(self, p2p_ops: list[dist.P2POp], desc: str | None = None) -> list[dist.Work]:
        """As torch's function of that name, which has no public one."""
        passed, works = list[dist.P2POp](), list[dist.Work]()
        for op in p2p_ops:
            seconds = self._delays.between(self._rank, op.peer) if op.op is dist.isend else 0.0
            if not seconds:
                passed.append(op)
                continue
            with self._changed:
                heapq.heappush(self._waiting, (time.monotonic() + seconds, next(self._numbers), op))
                self._changed.notify()
            works.append(_Sent())
        return works + self._batch(passed, desc)

    def _send(self) -> None:
        while True:
            with self._changed:
                while not self._waiting or self._waiting[0][0] > time.monotonic():
                    self._changed.wait(max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else None)
                _, _, op = heapq.heappop(self._waiting)
            self._works = [work for work in self._works if not work.is_completed()]
            self._works.append(dist.isend(op.tensor, group=op.group, tag=op.tag, group_dst=op.group_peer))


def delaying(delays: Delays) -> Any:
    """A factory of transports over these links."""
    return partial(DelayingTransport, delays=delays)
