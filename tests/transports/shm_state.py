"""Slots and descriptors of this process, counted by the kernel; and a helper thread that tests hold."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from torch import Tensor
from transports.makers import RUN_ID, contexts, started

from rrfp.testing.transport_checks import PairOptions
from rrfp.transports.base import Message
from rrfp.transports.shm.packets import pack
from rrfp.transports.shm.slots import HEAD_BYTES
from rrfp.transports.shm.transport import ShmTransport
from rrfp.transports.wire.codec import VERSION

MIB = 1 << 20


@asynccontextmanager
async def shm_pair(options: PairOptions | None = None, **changes: Any) -> AsyncIterator[tuple[ShmTransport, ...]]:
    """Two started ends, or three, on this loop."""
    ends = tuple(ShmTransport(context) for context in contexts(options, **changes))
    async with started(*ends):
        yield ends


@pytest.fixture(autouse=True, scope="module")
def no_garbage() -> None:
    """For every module that counts: what earlier ones hold in the frames of their errors is gone."""
    gc.collect()


@pytest.fixture(autouse=True)
def no_mappings() -> None:
    """The same before each test. A whole collection takes a third of a second: only where there are slots left."""
    gc.collect(1)
    if mappings():
        gc.collect()


def mappings() -> list[int]:
    """The bytes of each mapping of a slot; a slot between two ends of this process has two."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:rrfp-" in line:
            start, _, end = line.split()[0].partition("-")
            found.append(int(end, 16) - int(start, 16))
    return found


def descriptors() -> int:
    """The open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def room(tensor_bytes: int) -> int:
    """The most that the mapping of a slot for one tensor may have: an eighth and a page more."""
    return tensor_bytes + tensor_bytes // 8 + HEAD_BYTES + 4096


def filled(num_bytes: int, value: int) -> Tensor:
    """A tensor of bytes."""
    return torch.full((num_bytes,), value % 251, dtype=torch.uint8)


def only(message: Message) -> Tensor:
    """The one tensor of a message."""
    (tensor,) = message.tensors
    assert tensor is not None
    return tensor


@contextmanager
def copies_held(end: ShmTransport) -> Iterator[Callable[[], None]]:
    """Occupies the helper thread of an end until the yielded function is called, or the block ends."""
    gate, entered = threading.Event(), threading.Event()

    def wait() -> None:
        entered.set()
        gate.wait()

    assert end._copier is not None
    end._copier.run(wait, now=False)
    entered.wait(10)
    try:
        yield gate.set
    finally:
        gate.set()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a state that no event announces."""
    async with asyncio.timeout(10):
        while not condition():
            gc.collect()
            await asyncio.sleep(0.002)


def frame(kind: str, *fields: Any, run_id: str = RUN_ID, sender: Any = 1, version: int = VERSION) -> bytes:
    """A datagram with a frame of the link."""
    header: bytes = msgpack.packb([version, run_id, 0, sender, kind, *fields])
    return b"".join(pack(header))
