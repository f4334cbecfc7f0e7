"""Pairs of our transports for the conformance checks: on one loop, also late, on two loops in two threads, over zmq."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

import zmq
from transports.gloo_backend import over_gloo
from transports.relay import RelayingRendezvous

from rrfp.lab.simulated_transport import Latency, SimulatedTransport, no_latency
from rrfp.testing.transport_checks import MakePair, Pair, PairOptions
from rrfp.transports.auto import AutoTransport
from rrfp.transports.base import Channel, Message, Transport, TransportContext, TransportStatistics
from rrfp.transports.inproc import InprocTransport
from rrfp.transports.rendezvous import LocalRendezvous
from rrfp.transports.secret import Secret
from rrfp.transports.shm.packets import DatagramBody, pack
from rrfp.transports.shm.transport import ShmTransport
from rrfp.transports.shm.trial import Host
from rrfp.transports.zmq.transport import ZmqTransport

_Result = TypeVar("_Result")

RUN_ID = "checks"

SECRET = Secret(b"the secret of the conformance checks")


def contexts(options: PairOptions | None = None, **changes: Any) -> list[TransportContext]:
    """The contexts of ranks that are each other's only peers: two, unless three are asked for."""
    options = options or PairOptions()
    rendezvous = LocalRendezvous()
    fields: dict[str, Any] = {
        "run_id": RUN_ID,
        "rendezvous": rendezvous,
        "queue_bytes": options.queue_bytes,
        "max_message_bytes": options.max_message_bytes,
        "connect_timeout_s": 10.0,
    }
    ranks = range(options.ranks)
    return [
        TransportContext(rank=rank, peers=tuple(one for one in ranks if one != rank), **(fields | changes))
        for rank in ranks
    ]


class LoopInThread:
    """An event loop that runs in a thread of its own until the end of the `with` block."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="second-loop")

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._ready.set()
        await self._stop.wait()

    async def __aenter__(self) -> LoopInThread:
        self._thread.start()
        await asyncio.to_thread(self._ready.wait)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.post(self._stop.set)
        await asyncio.to_thread(self._thread.join)

    def post(self, callback: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback)

    async def run(self, coroutine: Coroutine[Any, Any, _Result]) -> tuple[asyncio.Task[_Result], bool]:
        """Run ``coroutine`` over there; returns the ended task, and whether this call was cancelled meanwhile.

        A cancellation is passed on, and what became of it is waited for: so nothing is lost between the loops.
        """
        here, done, cancelled = asyncio.get_running_loop(), asyncio.Event(), False
        started: list[asyncio.Task[_Result]] = []

        def begin() -> None:
            started.append(self._loop.create_task(coroutine))
            started[0].add_done_callback(lambda _: here.call_soon_threadsafe(done.set))

        self.post(begin)
        while not done.is_set():
            try:
                await done.wait()
            except asyncio.CancelledError:
                cancelled = True
                self.post(lambda: started[0].cancel())
        return started[0], cancelled


class Elsewhere(Transport):
    """A transport that lives on another loop. What a cancelled ``receive`` had got already is returned by the next."""

    def __init__(self, inner: Transport, loop: LoopInThread) -> None:
        super().__init__(inner.context)
        self._inner = inner
        self._loop = loop
        self._kept: list[Message] = []

    async def _run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        task, cancelled = await self._loop.run(coroutine)
        if cancelled and not task.cancelled() and task.exception() is None:
            if isinstance(result := task.result(), Message):
                self._kept.append(result)
            raise asyncio.CancelledError
        return task.result()

    async def start(self) -> None:
        await self._run(self._inner.start())

    async def send(self, peer: int, message: Message) -> None:
        await self._run(self._inner.send(peer, message))

    async def receive(self) -> Message:
        return self._kept.pop(0) if self._kept else await self._run(self._inner.receive())

    async def close(self) -> None:
        await self._run(self._inner.close())

    def abort(self) -> None:
        self._loop.post(self._inner.abort)

    def statistics(self) -> TransportStatistics:
        return self._inner.statistics()


@asynccontextmanager
async def started(*transports: Transport, inject: Any = None, silence: Any = None) -> AsyncIterator[Pair]:
    """Start all; abort all in the end."""
    left, right, *others = transports
    try:
        await asyncio.gather(*(transport.start() for transport in transports))
        yield Pair(left, right, RUN_ID, inject, silence, others[0] if others else None)
    finally:
        for transport in transports:
            transport.abort()


def on_two_loops(make: Callable[[TransportContext], Transport]) -> MakePair:
    """A maker of pairs whose right end has a loop in a thread of its own."""

    @asynccontextmanager
    async def make_pair(options: PairOptions) -> AsyncIterator[Pair]:
        left, right, *others = map(make, contexts(options))
        async with LoopInThread() as loop, started(left, Elsewhere(right, loop), *others) as pair:
            yield pair

    return make_pair


@asynccontextmanager
async def inproc_one_loop(options: PairOptions) -> AsyncIterator[Pair]:
    async with started(*map(InprocTransport, contexts(options))) as pair:
        yield pair


def simulated(latency: Latency = no_latency) -> MakePair:
    """A maker of pairs on one loop whose messages take that long."""

    @asynccontextmanager
    async def make_pair(options: PairOptions) -> AsyncIterator[Pair]:
        async with started(*(SimulatedTransport(context, latency) for context in contexts(options))) as pair:
            yield pair

    return make_pair


def over_zmq(address: str, **changes: Any) -> MakePair:
    """A maker of pairs that bind ``address``, with a way to inject frames past the sender's checks."""

    @asynccontextmanager
    async def make_pair(options: PairOptions) -> AsyncIterator[Pair]:
        transports = [ZmqTransport(context, address) for context in contexts(options, **changes)]
        left = transports[0]

        async def inject(channel: Channel, header: bytes, frames: Sequence[bytes]) -> None:
            left._links[1].outlets[channel]._socket.send_multipart([header, *frames], flags=zmq.NOBLOCK)

        async with started(*transports, inject=inject) as pair:
            yield pair

    return make_pair


def injecting_datagrams(left: ShmTransport) -> Any:
    """Sends datagrams past the sender's checks."""

    async def inject(channel: Channel, header: bytes, frames: Sequence[bytes]) -> None:
        packets = left._links[1]._connections[channel].packets
        packets.post(
            pack(header, DatagramBody(len(frames), sum(map(len, frames))), [memoryview(frame) for frame in frames])
        )

    return inject


@asynccontextmanager
async def over_shm(options: PairOptions) -> AsyncIterator[Pair]:
    transports = [ShmTransport(context) for context in contexts(options)]
    async with started(*transports, inject=injecting_datagrams(transports[0])) as pair:
        yield pair


class Store:
    """A rendezvous between ranks that do not look like ranks of one process."""

    def __init__(self) -> None:
        inner = LocalRendezvous()
        self.publish = inner.publish
        self.lookup = inner.lookup


class Abroad(AutoTransport):
    """Says that it runs on another host."""

    def _host(self) -> Host:
        return replace(super()._host(), boot="another")


@asynccontextmanager
async def auto_shm(options: PairOptions) -> AsyncIterator[Pair]:
    async with started(*map(AutoTransport, contexts(options, rendezvous=Store()))) as pair:
        yield pair


@asynccontextmanager
async def auto_mixed(options: PairOptions) -> AsyncIterator[Pair]:
    """Three ranks always, the third one abroad: so both others use two transports."""
    left, right, third = contexts(replace(options, ranks=3), rendezvous=Store(), secret=SECRET)
    async with started(AutoTransport(left), AutoTransport(right), Abroad(third)) as pair:
        yield replace(pair, third=pair.third if options.ranks == 3 else None)


@asynccontextmanager
async def collective_shm(options: PairOptions) -> AsyncIterator[Pair]:
    """Over gloo, announced over shm."""
    transports = list(map(over_gloo, contexts(options, rendezvous=Store())))

    async def inject(channel: Channel, header: bytes, frames: Sequence[bytes]) -> None:
        base: Any = transports[0]._links[1].base
        await injecting_datagrams(base)(channel, header, frames)

    async with started(*transports, inject=inject) as pair:
        yield pair


@asynccontextmanager
async def collective_inproc(options: PairOptions) -> AsyncIterator[Pair]:
    """Over gloo, announced in the process."""
    async with started(*map(over_gloo, contexts(options))) as pair:
        yield pair


@asynccontextmanager
async def zmq_relayed(options: PairOptions) -> AsyncIterator[Pair]:
    """Over tcp, through a relay that can fall silent; soon taken for lost then."""
    async with AsyncExitStack() as stack:
        rendezvous = RelayingRendezvous(stack)
        short = contexts(options, rendezvous=rendezvous, heartbeat_s=0.3, patience_s=1.0, allow_insecure=True)
        transports = [ZmqTransport(context, "127.0.0.1") for context in short]
        async with started(*transports, silence=rendezvous.silence) as pair:
            yield pair


MAKERS: dict[str, MakePair] = {
    "inproc": inproc_one_loop,
    "inproc-threads": on_two_loops(InprocTransport),
    "simulated": simulated(),
    "simulated-late": simulated(lambda stage, peer, message: 0.002),
    "auto-shm": auto_shm,
    "auto-mixed": auto_mixed,
    "collective": collective_shm,
    "collective-inproc": collective_inproc,
    "collective-threads": on_two_loops(over_gloo),
    "shm": over_shm,
    "shm-threads": on_two_loops(ShmTransport),
    "zmq-ipc": over_zmq("ipc"),
    "zmq-tcp": over_zmq("127.0.0.1", allow_insecure=True),
    "zmq-curve": over_zmq("127.0.0.1", secret=SECRET),
    "zmq-plain-data": over_zmq("127.0.0.1", secret=SECRET, plain_data=True),
    "zmq-relayed": zmq_relayed,
    "zmq-threads": on_two_loops(ZmqTransport),
}
