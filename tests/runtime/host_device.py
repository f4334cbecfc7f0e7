"""A device on the host's memory whose work is complete when it is issued: for what does not depend on time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from rrfp.devices.base import Device, DeviceMemory, Event, Stream


class HostEvent(Event):
    def __init__(self, late_by: float = 0.0) -> None:
        self.time = time.monotonic() + late_by

    def synchronize(self) -> None: ...

    def seconds_since(self, base: Event) -> float:
        assert isinstance(base, HostEvent)
        return self.time - base.time

    def release(self) -> None: ...


class HostStream(Stream):
    """Its work seems to be complete ``behind`` seconds after it was issued."""

    behind = 0.0

    @contextmanager
    def issuing(self) -> Iterator[None]:
        yield

    @property
    def strayed(self) -> bool:
        return False

    def record(self, *, is_timed: bool = False) -> Event:
        return HostEvent(self.behind)

    def wait(self, event: Event) -> None: ...


class HostDevice(Device):
    """Counts the streams that it has made; says that it uses ``in_use``."""

    kind = "host"
    name = "host:0"

    def __init__(self) -> None:
        self.num_streams = 0
        self.in_use = DeviceMemory(0, 0, 0)

    def stream(self, *, is_urgent: bool = False) -> Stream:
        self.num_streams += 1
        return HostStream()

    def current_stream(self) -> Stream:
        return HostStream()

    def holds(self, tensor: Tensor) -> bool:
        return True

    def note_use(self, tensor: Tensor, stream: Stream) -> None: ...

    def empty(self, tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor)

    def empty_on_host(self, tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor)

    def memory(self) -> DeviceMemory:
        return self.in_use


class CudaLike(HostDevice):
    """Says that it is the second CUDA device."""

    kind = "cuda"
    name = "cuda:1"
