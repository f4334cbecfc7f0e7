"""Several processes on one device, with slots of its memory between them."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import context, fork_server
from gpu.models import DEMO
from gpu.stub.control import CudaStub
from torch.distributed import FileStore  # type: ignore[attr-defined]
from under_torchrun import reports

from benchmarks.gpu.target import Target, open_target
from rrfp.compute.lanes.stream import StreamLane
from rrfp.devices.copies import SharesDeviceMemory, copies_of
from rrfp.errors import PeerLostError, TransportError
from rrfp.lab.device_double import DoubleDevice
from rrfp.testing.transport_checks.pair import data, index_of, soon
from rrfp.transports.base import Message, TransportContext
from rrfp.transports.cuda_ipc.transport import CudaIpcTransport
from rrfp.transports.rendezvous import StoreRendezvous

__all__ = ["fork_server"]

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

#: Of a tensor, by the device.
NUM_BYTES = {"cuda": 64 << 20, "stub": 4 << 20, "double": 4 << 20}


@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_have_the_bits_of_staging(ranks: int, target: Target, record_property: Any) -> None:
    least = DEMO[target.name].microbatches
    for report in reports("gpu/ipc_rank.py", target.name, ranks=ranks, timeout_s=200):
        record_property(f"rank {report['rank']}", f"{report['written']} pieces written, {report['read']} read")
        assert report["problems"] == []
        assert report["staged"] == 0
        assert report["written"] > least
        assert report["read"] > least
        assert 1 <= report["made"] == report["opened"] <= 2  # one for each neighbour, and none in a step
        assert report["same_bits"]


def transport_over(target: Target, rank: int, store: str) -> CudaIpcTransport:
    rendezvous = StoreRendezvous(FileStore(store, 2), run_id="kills")
    return CudaIpcTransport(
        TransportContext(
            rank,
            (1 - rank,),
            "kills",
            rendezvous,
            copies=copies_of(target.device, StreamLane),
            patience_s=5.0,
        )
    )


def _send_without_end(device: str, store: str, connection: Connection) -> None:
    torch.set_num_threads(1)

    async def main(target: Target) -> None:
        transport = transport_over(target, 1, store)
        await transport.start()
        index = 0
        while True:
            tensor = torch.full((NUM_BYTES[device],), index % 251, dtype=torch.uint8, device=target.where)
            if target.is_cuda:
                torch.cuda.synchronize()
            await transport.send(0, data(tensor, index=index))
            index += 1

    with open_target(device) as target:
        asyncio.run(main(target))


@pytest.mark.parametrize("received", range(5))
async def test_a_sender_killed_while_its_memory_is_read_is_one_loss(
    received: int, target: Target, tmp_path: Path, record_property: Any
) -> None:
    """What came is right, also after its death; and the device goes on."""
    store, before = str(tmp_path / "store"), opened(target)
    here, there = context().Pipe()
    process = context().Process(target=_send_without_end, args=(target.name, store, there))
    await asyncio.to_thread(process.start)
    transport = transport_over(target, 0, store)
    try:
        await transport.start()
        link = transport._links[1]
        assert type(link).__name__ == "TunnelLink", "the trial failed"
        messages = [await soon(transport.receive(), "a tensor comes") for _ in range(received)]
        hold_reads(target, transport)
        async with asyncio.timeout(20):
            while not link._arrivals.completing:  # noqa: ASYNC110 - nothing is received before it has ended
                await asyncio.sleep(0.001)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        began = time.monotonic()
        assert (await until_lost(transport, messages)).peer == 1
        record_property("seconds until the loss", f"{time.monotonic() - began:.2f}")
        for number, message in enumerate(messages):
            assert index_of(message) == number
            (tensor,) = message.tensors
            assert tensor is not None
            assert bool((tensor == number % 251).all())
        assert torch.ones(4, device=target.where).sum().item() == 4
        assert opened(target) == before + (target.name == "stub")
        transport.abort()
        async with asyncio.timeout(20):
            while opened(target) > before:  # noqa: ASYNC110 - behind the last copy, on a thread
                await asyncio.sleep(0.001)
    finally:
        transport.abort()
        process.kill()
        await asyncio.to_thread(process.join)
        here.close()
        there.close()


def _receive_while_the_device_breaks(device: str, store: str, connection: Connection) -> None:
    torch.set_num_threads(1)

    async def main(target: Target) -> None:
        transport = transport_over(target, 0, store)
        try:
            await transport.start()
            link = transport._links[1]
            messages = [await transport.receive()]
            hold_reads(target, transport)
            while not link._arrivals.completing:  # noqa: ASYNC110 - nothing is received before it has ended
                await asyncio.sleep(0.001)
            if isinstance(target.device, DoubleDevice):
                target.device.fail(everywhere=True)
            else:
                CudaStub().break_device()
            while True:
                messages.append(await transport.receive())
        except TransportError as error:
            connection.send(str(error))
        finally:
            transport.abort()

    with open_target(device) as target:
        asyncio.run(main(target))


async def test_a_device_that_breaks_while_a_slot_is_read_is_an_error_and_its_process_ends_in_order(
    target: Target, tmp_path: Path
) -> None:
    if target.name == "cuda":
        pytest.skip("a GPU breaks by a kernel of a task only: test_failures.py")
    here, there = context().Pipe()
    processes = [
        context().Process(target=serve, args=(target.name, str(tmp_path / "store"), there))
        for serve in (_receive_while_the_device_breaks, _send_without_end)
    ]
    try:
        for process in processes:
            await asyncio.to_thread(process.start)
        assert await asyncio.to_thread(here.poll, 100), "no error was raised"
        assert "while tensors of output" in await asyncio.to_thread(here.recv)
        await asyncio.to_thread(processes[0].join, 60)
        assert processes[0].exitcode == 0
    finally:
        for process in processes:
            process.kill()
            await asyncio.to_thread(process.join)
        here.close()
        there.close()


def opened(target: Target) -> int:
    """How many blocks of other processes' memory the stub has open; the other devices do not tell."""
    return CudaStub().live("opened_blocks") if target.name == "stub" else 0


async def until_lost(transport: CudaIpcTransport, messages: list[Message]) -> PeerLostError:
    while True:
        try:
            messages.append(await soon(transport.receive(), "the loss is reported"))
        except PeerLostError as error:
            return error


def hold_reads(target: Target, transport: CudaIpcTransport) -> None:
    """Keep the stream on which slots are read busy for some time, so that the death comes before the next one's end."""
    copies = transport.context.copies
    assert isinstance(copies, SharesDeviceMemory)
    receiving: Any = copies._lanes["rrfp-copies-receive-1"]
    if target.is_cuda:
        with receiving._stream.issuing():
            torch.cuda._sleep(500_000_000)  # type: ignore[no-untyped-call]
