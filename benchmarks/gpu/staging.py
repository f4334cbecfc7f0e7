"""How fast tensors travel: between device and host, and from rank to rank of one process."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.target import Target
from rrfp.compute.lanes.stream import StreamLane
from rrfp.devices.copies import DeviceCopies
from rrfp.model.tasks import Kind, Mode, StepId, Task
from rrfp.transports.base import Channel, Message, MessageKind, Transport, TransportContext
from rrfp.transports.registry import create_transport
from rrfp.transports.rendezvous import LocalRendezvous
from rrfp.transports.tunnel.transport import staged


@dataclass(frozen=True, slots=True)
class Rate:
    """Bytes a second of one way.

    Attributes:
        way: from where to where.
        num_bytes: of the tensor.
        seconds: the median of its transfers, one at a time.
    """

    way: str
    num_bytes: int
    seconds: float

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes a second."""
        return self.num_bytes / self.seconds / 1e9


def measure_staging(target: Target, *, sizes: tuple[int, ...], repeats: int) -> list[Rate]:
    """Every way with tensors of every size."""
    return asyncio.run(_measure(target, sizes, repeats))


async def _measure(target: Target, sizes: tuple[int, ...], repeats: int) -> list[Rate]:
    rates = []
    for num_bytes in sizes:
        tensor = torch.ones(num_bytes, dtype=torch.uint8, device=target.where)
        copies = DeviceCopies(target.device, StreamLane, "benchmark")
        for way, copy in _ways(copies, tensor).items():
            rates.append(Rate(way, num_bytes, await _median_s(copy, repeats)))
        copies.close()
        for name in ("inproc", "shm", "zmq"):
            async with AsyncExitStack() as stack:
                pair = await _pair(target, name, stack)
                transfer = partial(_send_and_receive, *pair, tensor)
                rates.append(Rate(f"rank to rank, {name}", num_bytes, await _median_s(transfer, repeats)))
    return rates


def _ways(copies: DeviceCopies, tensor: Tensor) -> dict[str, Callable[[], Awaitable[object]]]:
    pageable = torch.ones(tensor.shape, dtype=tensor.dtype)
    return {
        "device to host": lambda: copies.to_host([tensor]),
        "host to device": lambda: copies.to_device([pageable]),
        "device to device": lambda: copies.copy([tensor], copies),
    }


async def _median_s(transfer: Callable[[], Awaitable[object]], repeats: int) -> float:
    samples = []
    for _ in range(repeats + 2):
        began = time.perf_counter()
        await transfer()
        samples.append(time.perf_counter() - began)
    return statistics.median(samples[2:])


async def _pair(target: Target, name: str, stack: AsyncExitStack) -> tuple[Transport, Transport]:
    met = LocalRendezvous()
    pair = []
    for rank in (0, 1):
        copies = DeviceCopies(target.device, StreamLane, f"benchmark-{rank}")
        context = TransportContext(rank, (1 - rank,), "staging", met, copies=copies)
        pair.append(staged(create_transport(name, context), copies))
        stack.callback(pair[-1].abort)
    await asyncio.gather(*(transport.start() for transport in pair))
    return pair[0], pair[1]


async def _send_and_receive(sender: Transport, receiver: Transport, tensor: Tensor) -> Message:
    step, task = StepId(0, Mode.TRAIN, 1), Task(Kind.F, 0, 0)
    message = Message(Channel.FORWARD, MessageKind.OUTPUT, step, task, (tensor,))
    _, received = await asyncio.gather(sender.send(1, message), receiver.receive())
    return received
