"""Ranks with slots of device memory between them, on doubles."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import transports.makers as makers
from compute.separate_double import SeparateDouble, check_races, closing
from torch import Tensor
from transports.peer_process import stuck_after_trial

from rrfp.compute.lanes.stream import StreamLane
from rrfp.devices.base import SharedMemory
from rrfp.devices.copies import copies_of
from rrfp.lab.device_double import DoubleSharing
from rrfp.testing.transport_checks import PairOptions
from rrfp.transports.auto import auto_transport
from rrfp.transports.base import Transport
from rrfp.transports.cuda_ipc.transport import CudaIpcTransport


class Stuck(SeparateDouble):
    """Completes the trial, and nothing after it."""

    def __init__(self) -> None:
        super().__init__(stuck_after_trial)


class Ends:
    """Started transports and their devices."""

    def __init__(self, devices: Sequence[SeparateDouble | None], **changes: Any) -> None:
        self.devices = devices
        options = PairOptions(ranks=len(devices))
        contexts = makers.contexts(options, **({"rendezvous": makers.Store()} | changes))
        self.contexts = [
            replace(context, copies=None if device is None else copies_of(device, StreamLane))
            for context, device in zip(contexts, devices, strict=True)
        ]
        self.ranks: list[Transport] = [auto_transport(context) for context in self.contexts]

    @property
    def left(self) -> Transport:
        return self.ranks[0]

    @property
    def right(self) -> Transport:
        return self.ranks[1]


@asynccontextmanager
async def ends(*devices: SeparateDouble | None, may_race: bool = False, **changes: Any) -> AsyncIterator[Ends]:
    made = Ends(devices or (SeparateDouble(0.0), SeparateDouble(0.0)), **changes)
    async with closing(made.devices), makers.started(*made.ranks):
        yield made
    if not may_race:
        check_races(made.devices)


def kinds(transport: Transport) -> dict[int, str]:
    """The class of the link to each peer: by slots, or through host memory."""
    assert isinstance(transport, CudaIpcTransport)
    return {peer: type(link).__name__ for peer, link in transport._links.items()}


class RefusingMemory(SharedMemory):
    """Reads other bytes than stand there."""

    def __init__(self, inner: SharedMemory) -> None:
        self.num_bytes, self.fields = inner.num_bytes, inner.fields
        self._inner = inner

    def write(self, start: int, source: Tensor) -> object:
        return self._inner.write(start, source)

    def read(self, start: int, target: Tensor) -> object:
        target.zero_()
        return None

    def close(self, *, is_open_elsewhere: bool = True) -> None:
        self._inner.close(is_open_elsewhere=is_open_elsewhere)


class Refusing(DoubleSharing):
    """Refuses, or fails, in one of its parts."""

    def __init__(self, part: str) -> None:
        self._part = part

    def allocate(self, num_bytes: int) -> SharedMemory:
        if self._part == "share":
            raise OSError("operation not supported")
        memory = super().allocate(num_bytes)
        if self._part == "fields":
            memory.fields = {**memory.fields, "size": -1}
        if self._part == "release":
            memory.close()
        return memory

    def open(self, fields: Mapping[str, Any]) -> SharedMemory:
        if self._part == "open":
            raise OSError("invalid device context")
        opened = super().open(fields)
        return RefusingMemory(opened) if self._part == "bytes" else opened


def refusing(part: str) -> SeparateDouble:
    device = SeparateDouble(0.0)
    device.sharing = Refusing(part)
    return device
