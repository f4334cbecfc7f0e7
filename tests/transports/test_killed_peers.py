"""A peer process that is killed is named at once, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from batches import long
from fork_server import fork_server
from transports.connected_peer import connected, next_loss
from transports.peer_process import LARGE_BYTES, RUN_ID, STREAMED_BYTES, send_without_end
from transports.shm_state import descriptors, mappings, until

from rrfp.devices.copies import SharesDeviceMemory
from rrfp.errors import PeerLostError
from rrfp.lab.device_double import DoubleDevice
from rrfp.testing.transport_checks.pair import data, index_of, soon
from rrfp.transports.base import Message, Transport
from rrfp.transports.cuda_ipc.slots import SLOTS
from rrfp.transports.cuda_ipc.transport import CudaIpcTransport

__all__ = ["fork_server"]


@pytest.fixture
def store(tmp_path: Path) -> str:
    return str(tmp_path / "store")


def assert_streamed(messages: Sequence[Message], first: int) -> None:
    """They are those of role "stream" or "large" from ``first`` on, in every byte."""
    for number, message in enumerate(messages, start=first):
        assert index_of(message) == number
        tensor = message.tensors[0]
        assert tensor is not None
        assert bool((tensor == number % 251).all())


def abstract_sockets() -> str:
    return Path("/proc/net/unix").read_text()


def shared_files() -> set[str]:
    """Files of shared memory. Tests beside this one have folders there, and the semaphores of their processes."""
    with os.scandir("/dev/shm") as entries:
        return {entry.name for entry in entries if not entry.is_dir() and not entry.name.startswith("sem.mp-")}


async def addresses(transport: Transport, name: str) -> list[str]:
    """Where the ranks listen, or did."""
    return [
        (await transport.context.rendezvous.lookup(f"{name}/{RUN_ID}/0/{rank}", 1.0)).decode().removeprefix("ipc://")
        for rank in (0, 1)
    ]


@pytest.mark.parametrize("name", ["shm", "zmq"])
async def test_killed_peer_is_named_at_once(store: str, name: str) -> None:
    shared = shared_files()
    async with connected(store, name, "echo") as (transport, process):
        listening = [address.removeprefix("@") for address in await addresses(transport, name)]
        assert listening[1] in abstract_sockets() or name == "shm"  # which listens only until all have connected
        await transport.send(1, data(torch.ones(3)))
        assert index_of(await soon(transport.receive(), "the echo comes")) == 0
        process.send_signal(signal.SIGKILL)
        start_s = time.monotonic()
        error, _ = await next_loss(transport)
        assert time.monotonic() - start_s < 1.0
        assert error.peer == 1
        with pytest.raises(PeerLostError):
            await transport.send(1, data(torch.ones(3)))
        await transport.close()
        await process.wait()
        assert not any(address in abstract_sockets() for address in listening)
    assert shared_files() <= shared


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("shm", "stream"),
        ("shm", "large"),
        ("zmq", "stream"),
        long("zmq", "large"),
        ("collective", "large"),
        ("cuda_ipc", "large"),
    ],
)
async def test_peer_killed_while_it_sends_delivered_whole_messages(store: str, name: str, role: str) -> None:
    """It dies in the middle of a tensor: what came whole is received, the rest is no frame error."""
    before, mapped = descriptors(), len(mappings())
    async with connected(store, name, role) as (transport, process):
        held = [await soon(transport.receive(), "a tensor comes") for _ in range(3)]
        process.send_signal(signal.SIGKILL)
        _, messages = await next_loss(transport)
        await process.wait()
        assert len(messages) * (STREAMED_BYTES if role == "stream" else LARGE_BYTES) <= 64 << 20
        await asyncio.to_thread(assert_streamed, [*held, *messages], first=0)  # also long after its death
        assert transport.statistics().dropped_frames == 0
    held.clear()
    messages.clear()
    if name == "shm":
        await until(lambda: len(mappings()) == mapped)
        await until(lambda: descriptors() <= before)


async def test_a_peer_that_holds_this_rank_s_tensors_may_be_killed(store: str) -> None:
    """Its slots are this rank's alone then, and end with the link."""
    mapped = len(mappings())
    async with connected(store, "shm", "hold") as (transport, process):
        for index in range(4):
            await transport.send(1, data(torch.full((1 << 20,), index, dtype=torch.uint8), index=index))
            assert index_of(await soon(transport.receive(), "the echo comes")) == index
        process.send_signal(signal.SIGKILL)
        await next_loss(transport)
        await until(lambda: len(mappings()) == mapped)


async def test_a_killed_peer_whose_child_keeps_its_sockets_is_named_at_once(store: str) -> None:
    """No socket ends, but the process does."""
    async with connected(store, "shm", "fork") as (transport, process):
        child = await process.hear()
        assert isinstance(child, int)
        try:
            process.send_signal(signal.SIGKILL)
            start_s = time.monotonic()
            error, _ = await next_loss(transport)
            assert time.monotonic() - start_s < 1.0
            assert (error.peer, error.reason) == (1, "its process ended")
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("name", ["shm", "zmq", "collective", "cuda_ipc"])
async def test_a_send_that_waits_while_its_peer_is_killed_ends(store: str, name: str) -> None:
    """A stopped peer reads nothing, so the send waits; SIGKILL ends it all the same."""
    async with connected(store, name, "echo") as (transport, process):
        await transport.send(1, data(torch.ones(3)))
        await soon(transport.receive(), "the echo comes")
        process.send_signal(signal.SIGSTOP)
        sending = asyncio.create_task(send_without_end(transport, 64 << 20))
        done, _ = await asyncio.wait({sending}, timeout=0.2)
        assert not done
        process.send_signal(signal.SIGKILL)
        start_s = time.monotonic()
        with pytest.raises(PeerLostError):
            await soon(sending, "the send ends")
        error, _ = await next_loss(transport)
        assert time.monotonic() - start_s < 1.0
        assert error.peer == 1


async def test_a_sender_killed_while_its_memory_is_read_is_one_loss(store: str) -> None:
    """This rank's device never completes the copy, so the death comes in the middle of it."""
    async with connected(store, "cuda_ipc", "stream", own_role="stuck") as (transport, process):
        assert isinstance(transport, CudaIpcTransport)
        link, copies = transport._links[1], transport.context.copies
        assert isinstance(copies, SharesDeviceMemory)
        device = copies._device
        assert isinstance(device, DoubleDevice)
        async with asyncio.timeout(20):
            while not device._memory._pending:  # noqa: ASYNC110 - nothing is received before its copy has ended
                await asyncio.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        error, messages = await next_loss(transport)
        assert (error.peer, messages) == (1, [])
        assert link._arrivals.completing
        with pytest.raises(PeerLostError):
            await transport.send(1, data(torch.ones(3)))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await transport.receive()


async def test_a_receiver_killed_before_it_gives_slots_back_ends_the_sends(store: str) -> None:
    """Its device never completes the copies."""
    async with connected(store, "cuda_ipc", "stuck") as (transport, process):
        copies = transport.context.copies
        assert copies is not None
        (tensor,) = await copies.to_device([torch.ones(3)])
        for _ in range(SLOTS):
            await soon(transport.send(1, data(tensor)), "there is a slot")
        sending = asyncio.create_task(transport.send(1, data(tensor)))
        done, _ = await asyncio.wait({sending}, timeout=0.2)
        assert not done
        process.send_signal(signal.SIGKILL)
        with pytest.raises(PeerLostError):
            await soon(sending, "the send ends")
        error, _ = await next_loss(transport)
        assert error.peer == 1
