"""One rank of the comparison in a process of its own: runs the plan's blocks, and reports each round.

Both processes go through the same plan; a barrier precedes each block. Rank 0's also has both ends of inproc, on two
loops. Blocking ways have a loop of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from socket import socket
from threading import BrokenBarrierError

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from benchmarks.shared.load import machine_busy_s
from benchmarks.shared.loops import submit
from benchmarks.transports.blocks import busy_lanes, copies, round_trips, stream
from benchmarks.transports.ends import End, GlooEnd, HoppingSocketEnd, Memory, SocketEnd, TransportEnd
from benchmarks.transports.processes import Barrier, Report, RoundReport, Sockets
from benchmarks.transports.settings import (
    GLOO,
    INPROC,
    MEMCPY,
    SHM,
    SOCKET,
    SOCKET_HOP,
    ZMQ_CURVE,
    ZMQ_IPC,
    ZMQ_TCP,
    Block,
    Counts,
    Kind,
    Settings,
)
from rrfp.pipeline.loop_thread import LoopThread
from rrfp.transports.base import Rendezvous, TransportContext
from rrfp.transports.registry import TransportFactory, create_transport
from rrfp.transports.rendezvous import LocalRendezvous, StoreRendezvous
from rrfp.transports.secret import Secret
from rrfp.transports.zmq.transport import ZmqTransport

#: By way: between the processes, and within one.
_TRANSPORTS: dict[str, str | TransportFactory] = {
    SHM: "shm",
    ZMQ_IPC: partial(ZmqTransport, address="ipc"),
    ZMQ_TCP: partial(ZmqTransport, address="127.0.0.1"),
    ZMQ_CURVE: partial(ZmqTransport, address="127.0.0.1"),
}

#: Of both ranks.
_SECRET = Secret(b"the secret of the transports' comparison")

#: The kinds of blocks that a transport's end is for: of a pair, one measures latency by the shortcuts.
_LATENCY, _STREAM = "latency", "stream"

#: Longer than any block: a process waits so long for one that has failed.
_BARRIER_S = 120.0


class Worker:
    """This rank.

    Args:
        rank: 0 or 1.
        folder: of this run alone.
        sockets: connected to the other rank's.
        barrier: of both processes.
    """

    def __init__(self, rank: int, folder: str, sockets: Sockets, barrier: Barrier) -> None:
        self._rank = rank
        self._folder = folder
        self._sockets = sockets
        self._barrier = barrier
        self._memory = Memory()
        #: By way and kinds of blocks, the ends of this process, each with its loop.
        self._ends: dict[tuple[str, str], list[tuple[LoopThread, End]]] = {}

    def connect(self, stack: ExitStack) -> None:
        """Make all ends; ``stack`` closes them."""
        dist.init_process_group("gloo", init_method=f"file://{self._folder}/gloo", rank=self._rank, world_size=2)
        stack.callback(dist.destroy_process_group)
        own, peer, blocking = (LoopThread(name) for name in ("loop", "peer's loop", "blocking"))
        for thread in (own, peer, blocking):
            stack.callback(thread.close)
        rank, memory, store = self._rank, self._memory, FileStore(f"{self._folder}/store", 2)
        self._add(GLOO, blocking, GlooEnd(rank, memory))
        self._add(SOCKET, blocking, SocketEnd(rank, memory, self._sockets.blocking))
        self._add(SOCKET_HOP, own, submit(own, _hopping(rank, memory, self._sockets.hopping)).result())
        for way, factory in _TRANSPORTS.items():
            for kinds in (_LATENCY, _STREAM):
                meet = partial(StoreRendezvous, store, run_id=f"{way} {kinds}")
                end = submit(own, _started(rank, memory, way, factory, meet, is_direct=kinds == _LATENCY)).result()
                self._add(way, own, end, kinds)
        if rank == 0:
            met = LocalRendezvous()
            threads = (own, peer)
            both = [
                submit(thread, _started(r, memory, INPROC, "inproc", lambda: met, is_direct=True))
                for r, thread in enumerate(threads)
            ]
            for thread, each in zip(threads, both, strict=True):
                self._add(INPROC, thread, each.result())
        stack.callback(self._close)

    def _add(self, way: str, thread: LoopThread, end: End, *kinds: str) -> None:
        for each in kinds or (_LATENCY, _STREAM):
            self._ends.setdefault((way, each), []).append((thread, end))

    def _close(self) -> None:
        every = {end: thread for ends in self._ends.values() for thread, end in ends}
        closing = [submit(thread, end.close()) for end, thread in every.items()]
        for each in closing:
            each.result()

    def round(self, blocks: list[Block], counts: Counts) -> RoundReport:
        """Run the blocks of one round."""
        self._memory.set_size(blocks[0].size)
        self._barrier.wait(_BARRIER_S)
        machine, wall, cpu = machine_busy_s(), time.perf_counter(), time.process_time()
        reports = [self._block(block, counts.of(block.kind)) for block in blocks]
        self._barrier.wait(_BARRIER_S)
        cpu, wall, now = time.process_time() - cpu, time.perf_counter() - wall, machine_busy_s()
        return RoundReport(reports, wall, cpu, None if machine is None or now is None else now - machine)

    def _block(self, block: Block, count: int) -> Report:
        ends = self._ends.get((block.way, _LATENCY if block.kind.is_latency else _STREAM), [])
        with busy_lanes(len(ends) if block.kind is Kind.BUSY else 0):
            self._barrier.wait(_BARRIER_S)
            cpu = time.process_time()
            seconds = self._run(block, ends, count)
            return Report(block, seconds, time.process_time() - cpu)

    def _run(self, block: Block, ends: list[tuple[LoopThread, End]], count: int) -> list[float]:
        read = block.kind is Kind.READ
        if block.way == MEMCPY:
            return copies(self._memory, count, read=read) if self._rank == 0 else []
        running = [
            submit(
                thread,
                round_trips(end, block.size, count)
                if block.kind.is_latency
                else stream(end, block.size, count, read=read),
            )
            for thread, end in ends
        ]
        return [seconds for each in running for seconds in each.result()]


async def _hopping(rank: int, memory: Memory, sock: socket) -> End:
    return HoppingSocketEnd(rank, memory, sock)


async def _started(
    rank: int,
    memory: Memory,
    way: str,
    factory: str | TransportFactory,
    meet: Callable[[], Rendezvous],
    *,
    is_direct: bool,
) -> TransportEnd:
    secret = _SECRET if way == ZMQ_CURVE else None
    context = TransportContext(rank, (1 - rank,), way, meet(), secret=secret, allow_insecure=secret is None)
    transport = create_transport(factory, context)
    await transport.start()
    return TransportEnd(rank, memory, transport, is_direct=is_direct)


def serve(rank: int, folder: str, settings: Settings, sockets: Sockets, barrier: Barrier, pipe: Connection) -> None:
    """The process: sends a `RoundReport` for each round of the plan."""
    torch.set_num_threads(1)
    try:
        with ExitStack() as stack:
            worker = Worker(rank, folder, sockets, barrier)
            worker.connect(stack)
            for blocks in settings.plan():
                pipe.send(worker.round(blocks, settings.counts[blocks[0].size]))
    except BrokenBarrierError:
        raise SystemExit(f"rank {rank} ends, as the other one failed") from None
    except BaseException:
        barrier.abort()
        raise
