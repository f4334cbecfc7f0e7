"""Tensors from this process to another one on the same device: by slots, and staged through host memory, in turns."""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]

from benchmarks.gpu.staging import Rate
from benchmarks.gpu.target import Target, open_target
from benchmarks.gpu.tasks import Product
from rrfp.compute.lanes.stream import StreamLane
from rrfp.devices.base import Event
from rrfp.devices.copies import copies_of
from rrfp.errors import PeerLostError
from rrfp.model.tasks import Kind, Mode, StepId, Task
from rrfp.transports.base import Channel, Message, MessageKind, Transport, TransportContext
from rrfp.transports.cuda_ipc.transport import CudaIpcTransport
from rrfp.transports.registry import create_transport
from rrfp.transports.rendezvous import StoreRendezvous
from rrfp.transports.tunnel.link import TunnelLink
from rrfp.transports.tunnel.transport import staged

#: By slots of device memory, and staged.
WAYS = ("cuda_ipc", "shm")

#: Bytes of the messages whose host time is measured.
SMALL_BYTES = 1 << 10

#: Products that a busy process has issued and that are not complete: two tasks' worth of work.
_QUEUED = 50

_STEP, _TASK = StepId(0, Mode.TRAIN, 1), Task(Kind.F, 0, 0)


@dataclass(frozen=True, slots=True)
class Between:
    """Messages between two processes.

    Attributes:
        has_slots: whether the trial at the start worked; else both ways are staged.
        rates: from sending a tensor to the other end's answer that it is there.
        busy_rates: the same, while the other process computes all the time.
        host_s: by way, seconds of this process's CPU time to send a small tensor and receive the answer.
    """

    has_slots: bool
    rates: list[Rate]
    busy_rates: list[Rate]
    host_s: Mapping[str, float]


def measure_between(target: Target, *, sizes: tuple[int, ...], repeats: int, messages: int, product: int) -> Between:
    """Beside an idle process, and beside one that multiplies matrices of the size ``product``."""
    idle = _measure_beside(target, sizes, repeats, messages, 0)
    busy = _measure_beside(target, sizes, repeats, 0, product)
    return replace(idle, busy_rates=busy.rates)


def _measure_beside(target: Target, sizes: tuple[int, ...], repeats: int, messages: int, product: int) -> Between:
    """Start the other process, and measure."""
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        other = multiprocessing.get_context("spawn").Process(
            target=_answer, args=(target.name, store, product), daemon=True
        )
        other.start()  # CUDA does not survive a fork
        try:
            return asyncio.run(_measure(target, store, sizes, repeats, messages))
        finally:
            other.join(10)
            other.kill()


async def _measure(target: Target, store: str, sizes: tuple[int, ...], repeats: int, messages: int) -> Between:
    async with AsyncExitStack() as stack:
        ends = await _ends(target, 0, store, stack)
        rates = []
        for num_bytes in sizes:
            tensor = torch.ones(num_bytes, dtype=torch.uint8, device=target.where)
            samples: dict[str, list[float]] = {way: [] for way in WAYS}
            for _ in range(repeats + 2):
                for way, end in ends.items():
                    began = time.perf_counter()
                    await _send_and_wait(end, tensor)
                    samples[way].append(time.perf_counter() - began)
            rates += [Rate(way, num_bytes, statistics.median(samples[way][2:])) for way in WAYS]
        small = torch.ones(SMALL_BYTES, dtype=torch.uint8, device=target.where)
        host_s = {way: await _host_s(end, small, messages) for way, end in ends.items()} if messages else {}
        sharing = ends["cuda_ipc"]
        assert isinstance(sharing, CudaIpcTransport)
        return Between(isinstance(sharing._links[1], TunnelLink), rates, [], host_s)


async def _host_s(end: Transport, tensor: Tensor, messages: int) -> float:
    began = time.process_time()
    for _ in range(messages):
        await _send_and_wait(end, tensor)
    return (time.process_time() - began) / messages


async def _send_and_wait(end: Transport, tensor: Tensor) -> None:
    message = Message(Channel.FORWARD, MessageKind.OUTPUT, _STEP, _TASK, (tensor,))
    await asyncio.gather(end.send(1, message), end.receive())


async def _ends(target: Target, rank: int, store: str, stack: AsyncExitStack) -> dict[str, Transport]:
    """This process's end of each way, started."""
    rendezvous = StoreRendezvous(FileStore(store, 2), run_id="processes")
    ends = {}
    for way in WAYS:
        copies = copies_of(target.device, StreamLane, f"benchmark-{way}")
        context = TransportContext(rank, (1 - rank,), f"processes-{way}", rendezvous, copies=copies)
        ends[way] = staged(create_transport(way, context), copies)
        stack.callback(ends[way].abort)
    await asyncio.gather(*(end.start() for end in ends.values()))
    return ends


def _answer(device: str, store: str, product: int) -> None:
    """The other process: answers each tensor, until its peer has gone."""
    torch.set_num_threads(1)

    async def main(target: Target) -> None:
        async with AsyncExitStack() as stack:
            ends = await _ends(target, 1, store, stack)
            await asyncio.gather(*map(_answer_over, ends.values()))

    with open_target(device) as target, _computing(target, product):
        asyncio.run(main(target))


@contextmanager
def _computing(target: Target, product: int) -> Iterator[None]:
    """Beside the block a thread keeps the device busy with products of matrices of this size; 0: none does."""
    ended = threading.Event()

    def compute() -> None:
        stream, work = target.device.stream(), Product(target, product)
        pending: deque[Event] = deque()
        while not ended.is_set():
            with stream.issuing():
                work.launch()
            pending.append(stream.record())
            if len(pending) > _QUEUED:
                pending[0].synchronize()
                pending.popleft().release()

    thread = threading.Thread(target=compute, daemon=True)
    if product:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if product:
            thread.join()


async def _answer_over(end: Transport) -> None:
    try:
        while True:
            await end.receive()
            await end.send(0, Message(Channel.CONTROL, MessageKind.PROBE))
    except PeerLostError:
        return
