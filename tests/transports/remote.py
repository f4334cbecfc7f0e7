"""Pairs whose left end lives in a process of its own, which can be stopped; this process forwards every call to it."""

from __future__ import annotations

import asyncio
import io
import itertools
import os
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from compute.separate_double import SeparateDouble, closing
from fork_server import context
from torch.distributed import FileStore  # type: ignore[attr-defined]
from transports.makers import RUN_ID, contexts, injecting_datagrams, started
from transports.on_device import OnDevice, base_of

from rrfp.compute.lanes.stream import StreamLane
from rrfp.devices.base import Device
from rrfp.devices.copies import copies_of
from rrfp.devices.cuda import CudaDevice
from rrfp.testing.transport_checks import MakePair, Pair, PairOptions
from rrfp.transports.base import Channel, Message, Transport, TransportContext, TransportStatistics
from rrfp.transports.cuda_ipc.transport import CudaIpcTransport
from rrfp.transports.rendezvous import StoreRendezvous
from rrfp.transports.shm.transport import ShmTransport

_STATISTICS_S = 0.02


class Pipe:
    """Values over a socket, both ways."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, sock: socket.socket) -> Pipe:
        return cls(*await asyncio.open_connection(sock=sock))

    def post(self, *value: Any) -> None:
        packed = io.BytesIO()
        torch.save(value, packed)  # plain pickle lacks some dtypes
        self._writer.write(packed.tell().to_bytes(8, "little") + packed.getbuffer())

    async def read(self) -> Any:
        size = int.from_bytes(await self._reader.readexactly(8), "little")
        return torch.load(io.BytesIO(await self._reader.readexactly(size)), weights_only=False)

    def close(self) -> None:
        self._writer.close()


class Remote(Transport):
    """Forwards calls and cancellations. What a cancelled ``receive`` had got already is returned by the next."""

    def __init__(self, context: TransportContext, pipe: Pipe) -> None:
        super().__init__(context)
        self._pipe = pipe
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._statistics = TransportStatistics()
        self._kept: list[Message] = []

    async def listen(self) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):  # the process has ended
            while True:
                kind, number, value = await self._pipe.read()
                if kind == "statistics":
                    self._statistics = value
                elif kind == "result":
                    self._calls.pop(number).set_result(value)
                else:
                    self._calls.pop(number).set_exception(value)
        for done in self._calls.values():
            done.cancel()

    async def call(self, name: str, *arguments: Any) -> Any:
        number = next(self._numbers)
        done = self._calls[number] = asyncio.get_running_loop().create_future()
        self._pipe.post(name, number, arguments)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            if not done.done():
                self._pipe.post("cancel", number, ())
                await asyncio.wait({done})
            if not done.cancelled() and done.exception() is None and isinstance(done.result(), Message):
                self._kept.append(done.result())
            raise

    async def start(self) -> None:
        await self.call("start")

    async def send(self, peer: int, message: Message) -> None:
        await self.call("send", peer, message)

    async def receive(self) -> Message:
        received: Message = self._kept.pop(0) if self._kept else await self.call("receive")
        return received

    async def close(self) -> None:
        await self.call("close")

    def abort(self) -> None:
        self._pipe.post("abort", -1, ())

    def statistics(self) -> TransportStatistics:
        return self._statistics


def _make(kind: str, context: TransportContext) -> tuple[Transport, Device | None]:
    """A transport of a kind, with tensors on a device of its own, if it is for such."""
    if kind == "shm":
        return ShmTransport(context), None
    device = CudaDevice() if kind == "cuda" else SeparateDouble(0.0)
    return OnDevice(CudaIpcTransport(replace(context, copies=copies_of(device, StreamLane))), device), device


def _injecting(transport: Transport) -> Any:
    if isinstance(transport, ShmTransport):
        return injecting_datagrams(transport)
    assert isinstance(transport, OnDevice)
    return injecting_datagrams(base_of(transport._inner))


async def _serve(transport: Transport, pipe: Pipe) -> None:
    tasks: dict[int, asyncio.Task[None]] = {}

    async def run(name: str, number: int, arguments: tuple[Any, ...]) -> None:
        try:
            result = await getattr(transport, name)(*arguments)
        except Exception as error:
            pipe.post("error", number, error)
        else:
            pipe.post("statistics", 0, transport.statistics())
            pipe.post("result", number, result)

    async def report() -> None:
        while True:
            pipe.post("statistics", 0, transport.statistics())
            await asyncio.sleep(_STATISTICS_S)

    reporting = asyncio.create_task(report())
    with suppress(asyncio.IncompleteReadError):
        while True:
            name, number, arguments = await pipe.read()
            if name == "cancel":
                tasks[number].cancel()
            elif name == "abort":
                transport.abort()
            elif name == "inject":
                await _injecting(transport)(*arguments)
                pipe.post("result", number, None)
            else:
                tasks[number] = asyncio.create_task(run(name, number, arguments))
                tasks[number].add_done_callback(partial(_report_cancelled, pipe, number))
    reporting.cancel()


def _report_cancelled(pipe: Pipe, number: int, task: asyncio.Task[None]) -> None:
    if task.cancelled():  # perhaps before it began
        pipe.post("result", number, None)


def _main(kind: str, sock: socket.socket, store: str, options: PairOptions) -> None:
    torch.set_num_threads(1)

    async def main() -> None:
        transport, _ = _make(kind, _contexts(store, options)[0])
        try:
            await _serve(transport, await Pipe.over(sock))
        finally:
            transport.abort()

    asyncio.run(main())


def _contexts(store: str, options: PairOptions) -> list[TransportContext]:
    rendezvous = StoreRendezvous(FileStore(store, options.ranks), run_id=RUN_ID)
    return contexts(options, rendezvous=rendezvous, heartbeat_s=0.1, patience_s=0.5)


def with_a_process(kind: str) -> MakePair:
    """A maker of pairs of a kind: shm, or cuda_ipc on the double ("double") or on CUDA ("cuda")."""

    @asynccontextmanager
    async def make_pair(options: PairOptions) -> AsyncIterator[Pair]:
        here, there = socket.socketpair()
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder) / "store")
            process = context().Process(target=_main, args=(kind, there, store, options))
            await asyncio.to_thread(process.start)
            there.close()
            own = _contexts(store, options)
            pipe = await Pipe.over(here)
            left = Remote(own[0], pipe)
            listening = asyncio.create_task(left.listen())
            made = [_make(kind, each) for each in own[1:]]

            async def silence() -> None:
                assert process.pid is not None
                os.kill(process.pid, signal.SIGSTOP)

            async def inject(channel: Channel, header: bytes, frames: Sequence[bytes]) -> None:
                await left.call("inject", channel, header, frames)

            try:
                ranks = [transport for transport, _ in made]
                async with (
                    closing([device for _, device in made]),
                    started(left, *ranks, inject=inject, silence=silence) as pair,
                ):
                    yield pair if kind == "shm" else replace(pair, run_id=f"{pair.run_id}/cuda_ipc")
            finally:
                pipe.close()
                process.kill()
                await asyncio.to_thread(process.join)
                process.close()
                await listening

    return make_pair


MAKERS: dict[str, MakePair] = {
    "shm-process": with_a_process("shm"),
    "cuda-ipc-process": with_a_process("double"),
}

#: For a machine with a CUDA device: a process cannot open memory of its own, so the other end is in another one.
ON_CUDA: dict[str, MakePair] = {"cuda-ipc": with_a_process("cuda")}
