"""Two ends of a staged transport, on a device each or on the CPU."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import torch
import transports.makers as makers
from compute.separate_double import SeparateDouble, check_races, closing, put
from torch import Tensor
from transports.on_device import CpuOnlyInproc

from rrfp.compute.lanes.stream import StreamLane
from rrfp.devices.base import Device
from rrfp.devices.copies import DeviceCopies
from rrfp.transports.base import Transport, TransportContext
from rrfp.transports.tunnel.transport import staged
from rrfp.transports.zmq.transport import ZmqTransport

MakeTransport = Callable[[TransportContext], Transport]


def zmq(context: TransportContext) -> Transport:
    return ZmqTransport(context, "ipc")


class GatedCopies(DeviceCopies):
    """Copies that begin when the test allows it."""

    def __init__(self, device: Device) -> None:
        super().__init__(device, StreamLane)
        self.gate = asyncio.Event()
        self.gate.set()

    async def to_device(self, tensors: Sequence[Tensor], *, peer: int | None = None) -> list[Tensor]:
        await self.gate.wait()
        return await super().to_device(tensors, peer=peer)


class Ends:
    """Two started transports of ranks with a device each, or None for the CPU; and what is behind them."""

    def __init__(self, make: MakeTransport, devices: Sequence[SeparateDouble | None], **changes: Any) -> None:
        self.devices = devices
        self.copies = [None if device is None else GatedCopies(device) for device in devices]
        contexts = [
            replace(context, copies=copies)
            for context, copies in zip(makers.contexts(**changes), self.copies, strict=True)
        ]
        self.inner = [make(context) for context in contexts]
        self.left, self.right = (staged(end, context.copies) for end, context in zip(self.inner, contexts, strict=True))


@asynccontextmanager
async def ends(
    make: MakeTransport = CpuOnlyInproc,
    devices: Sequence[SeparateDouble | None] | None = None,
    **changes: Any,
) -> AsyncIterator[Ends]:
    made = Ends(make, (SeparateDouble(), SeparateDouble()) if devices is None else devices, **changes)
    async with closing(made.devices), makers.started(made.left, made.right):
        yield made
    check_races(made.devices)


def on(device: SeparateDouble | None, *values: float) -> Tensor:
    tensor = torch.tensor(values, dtype=torch.float32)
    return tensor if device is None else put(device, tensor)


def is_on(device: SeparateDouble | None, tensor: Tensor | None) -> bool:
    assert tensor is not None
    return device is not None and device.holds(tensor)
