"""Pairs of transports whose messages have tensors on a device: the double, or CUDA."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import torch
import transports.makers as makers
import zmq
from compute.separate_double import SeparateDouble, check_races, closing, put, scribble
from torch import Tensor

from rrfp.compute.lanes.stream import StreamLane
from rrfp.devices.base import Device
from rrfp.devices.copies import copies_of
from rrfp.devices.cuda import CudaDevice
from rrfp.testing.transport_checks import MakePair, Pair, PairOptions
from rrfp.testing.transport_checks.pair import WrappedTransport
from rrfp.transports.base import Channel, Message, Transport, TransportContext
from rrfp.transports.cuda_ipc.transport import CudaIpcTransport
from rrfp.transports.inproc import InprocTransport
from rrfp.transports.shm.transport import ShmTransport
from rrfp.transports.tunnel.transport import staged
from rrfp.transports.zmq.transport import ZmqTransport


class OnDevice(WrappedTransport):
    """Puts what it sends on the device, overwrites it once it may, and brings back to the CPU what it receives."""

    def __init__(self, inner: Transport, device: Device) -> None:
        super().__init__(inner)
        self._device = device
        self.has_cancelled = False

    async def send(self, peer: int, message: Message) -> None:
        tensors = tuple(None if tensor is None else put(self._device, tensor) for tensor in message.tensors)
        try:
            await self._inner.send(peer, replace(message, tensors=tensors))
        except asyncio.CancelledError:
            self.has_cancelled = True
            raise
        finally:
            for tensor in tensors:
                if tensor is not None and tensor.layout is torch.strided:
                    scribble(tensor)

    async def receive(self) -> Message:
        message = await self._inner.receive()
        assert all(tensor is None or self._device.holds(tensor) for tensor in message.tensors), "not on the device"
        assert all(tensor is None or tensor.is_leaf for tensor in message.tensors), "not a leaf"
        return replace(message, tensors=tuple(map(self._back, message.tensors)))

    def _back(self, tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        return tensor.detach().clone().cpu().requires_grad_(tensor.requires_grad)


class CpuOnlyInproc(InprocTransport):
    """The reference transport as a plugin that knows no devices."""

    def __init__(self, context: TransportContext) -> None:
        super().__init__(replace(context, copies=None))


MakeTransport = Callable[[TransportContext], Transport]
MakeDevice = Callable[[], Device]


def over(
    make: MakeTransport,
    make_device: MakeDevice = SeparateDouble,
    *,
    is_shared: bool = False,
) -> MakePair:
    """A maker of pairs over ``make``, staged where that does not carry the device; its ends may share one device."""

    @asynccontextmanager
    async def make_pair(options: PairOptions) -> AsyncIterator[Pair]:
        devices = [make_device() for _ in range(options.ranks)]
        if is_shared:
            devices = devices[:1] * options.ranks
        contexts = [
            replace(context, copies=copies_of(device, StreamLane))
            for context, device in zip(makers.contexts(options), devices, strict=True)
        ]
        inner = [make(context) for context in contexts]
        ends = [
            OnDevice(staged(end, context.copies), device)
            for end, context, device in zip(inner, contexts, devices, strict=True)
        ]
        async with closing(devices), makers.started(*ends, inject=injecting(inner[0])) as pair:
            if isinstance(inner[0], CudaIpcTransport):
                yield replace(pair, run_id=f"{pair.run_id}/cuda_ipc")
            else:
                yield replace(pair, read_ahead=2)  # one on its way to the device, and the next
        check_races(devices, may_write=any(end.has_cancelled for end in ends))

    return make_pair


def injecting(left: Transport) -> Any:
    """Sends raw frames past the sender's checks; None where nothing travels as frames."""
    if isinstance(left, ShmTransport):
        return makers.injecting_datagrams(left)
    if type(left) is CudaIpcTransport:
        return injecting_below(left)
    if not isinstance(left, ZmqTransport):
        return None

    async def inject(channel: Channel, header: bytes, frames: Sequence[bytes]) -> None:
        left._links[1].outlets[channel]._socket.send_multipart([header, *frames], flags=zmq.NOBLOCK)

    return inject


def injecting_below(left: CudaIpcTransport) -> Any:
    """Sends raw datagrams over the base transport of the link with slots."""

    async def inject(channel: Channel, header: bytes, frames: Sequence[bytes]) -> None:
        await makers.injecting_datagrams(base_of(left))(channel, header, frames)

    return inject


def base_of(transport: Transport, peer: int = 1) -> Any:
    """What brings announcements to ``peer``."""
    assert isinstance(transport, CudaIpcTransport)
    return transport._links[peer].base


class CudaIpcOverZmq(CudaIpcTransport):
    """Announces over zmq."""

    async def _start_bases(self, bases: Iterable[Transport]) -> None:
        await super()._start_bases([ZmqTransport(base.context, "ipc") for base in bases])


def _over_zmq(context: TransportContext) -> Transport:
    return ZmqTransport(context, "ipc")


MAKERS: dict[str, MakePair] = {
    "staged-shm": over(ShmTransport),
    "staged-zmq": over(_over_zmq),
    "staged-inproc": over(CpuOnlyInproc),
    "inproc-device": over(InprocTransport, is_shared=True),
    "cuda-ipc": over(CudaIpcTransport),
    "cuda-ipc-zmq": over(CudaIpcOverZmq),
}

#: For a machine with a CUDA device.
ON_CUDA: dict[str, MakePair] = {
    "staged-shm": over(ShmTransport, CudaDevice),
    "staged-zmq": over(_over_zmq, CudaDevice),
    "inproc": over(InprocTransport, CudaDevice, is_shared=True),
}
