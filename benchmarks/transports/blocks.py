"""Blocks of messages between two ends, and the lanes beside them."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from benchmarks.transports.ends import End, Memory

#: Messages that wait in a lane or are read there: the receiver holds no more.
_LANE_MESSAGES = 2

#: A busy lane: side of the matrices that it multiplies (half a millisecond a product), and a short part in Python.
_SIDE = 256
_PYTHON_STEPS = 500


class Lane:
    """A thread that reads each received tensor once, and drops it. Used on one loop only."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._room = asyncio.Semaphore(_LANE_MESSAGES)
        self._tensors: queue.SimpleQueue[Tensor | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="lane", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (tensor := self._tensors.get()) is not None:
            tensor.sum()
            del tensor  # before the next one is waited for
            self._loop.call_soon_threadsafe(self._room.release)

    async def read(self, tensor: Tensor | None) -> None:
        """Hand over a tensor; waits while the lane is full."""
        await self._room.acquire()
        self._tensors.put(tensor)

    async def finish(self) -> None:
        """Wait until everything was read, and end the thread."""
        for _ in range(_LANE_MESSAGES):
            await self._room.acquire()
        self._tensors.put(None)
        self._thread.join()


async def round_trips(end: End, size: int, count: int) -> list[float]:
    """Seconds of half round trips; both messages have ``size`` bytes. Nothing at rank 1."""
    samples = []
    for _ in range(count):
        if end.rank == 0:
            started = time.perf_counter()
            await end.send(size)
            await end.receive(size)
            samples.append((time.perf_counter() - started) / 2)
        else:
            await end.receive(size)
            await end.send(size)
    return samples


async def stream(end: End, size: int, count: int, *, read: bool) -> list[float]:
    """Seconds from the first of ``count`` messages to the acknowledgement of the last. Nothing at rank 1."""
    if end.rank == 0:
        started = time.perf_counter()
        for _ in range(count):
            await end.send(size)
        await end.receive(0)
        return [time.perf_counter() - started]
    lane = Lane() if read else None
    for _ in range(count):
        if lane is None:
            await end.receive(size)
        else:
            await lane.read(await end.receive(size))
    if lane is not None:
        await lane.finish()
    await end.send(0)
    return []


def copies(memory: Memory, count: int, *, read: bool) -> list[float]:
    """Seconds of ``count`` copies within this process; with ``read``, each is also summed once."""
    started = time.perf_counter()
    for _ in range(count):
        target = memory.to_receive()
        np.copyto(target.numpy(), memory.to_send().numpy())
        if read:
            target.sum()
    return [time.perf_counter() - started]


@contextmanager
def busy_lanes(count: int) -> Iterator[None]:
    """``count`` threads that compute as lanes do: mostly in torch, which releases the GIL, and a little in Python."""
    enough = threading.Event()

    def compute() -> None:
        matrix = torch.rand(_SIDE, _SIDE)
        while not enough.is_set():
            torch.mm(matrix, matrix)
            sum(range(_PYTHON_STEPS))

    threads = [threading.Thread(target=compute, name="busy lane", daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        enough.set()
        for thread in threads:
            thread.join()
