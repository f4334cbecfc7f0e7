"""Shm under limits and beside strangers: functions for processes of their own."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import platform
import resource
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
import zmq
from transports.children import NEW_MOUNTS, NEW_NETWORK, NEW_PIDS, NOT_PERMITTED, refuse, unshare
from transports.makers import contexts
from transports.shm_state import MIB, descriptors, filled, mappings, only, shm_pair, until

from rrfp.errors import TransportError
from rrfp.testing.transport_checks import PairOptions
from rrfp.testing.transport_checks.pair import data, index_of, note, receive, soon
from rrfp.transports.base import Channel
from rrfp.transports.shm.endpoint import connect
from rrfp.transports.shm.transport import ShmTransport, address_key
from rrfp.transports.shm.trial import this_host


@contextmanager
def no_more_descriptors(spare: int) -> Iterator[None]:
    """Inside, this process may open only ``spare`` files."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors() + 16, limits[1]))
    opened = []
    with suppress(OSError):
        while True:
            opened.append(os.dup(0))
    for _ in range(spare):
        os.close(opened.pop())
    try:
        yield
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def sender_without_descriptors() -> str:
    """Returns the error of a send."""

    async def main() -> str:
        async with shm_pair(PairOptions(queue_bytes=MIB)) as (left, right):
            await left.send(1, note(1))
            assert index_of(await receive(right)) == 1
            opened = descriptors()
            for spare in (0, 1):  # to make a slot takes one descriptor, to map it another one
                for size in (MIB, 3 * MIB):
                    with no_more_descriptors(spare):
                        try:
                            await soon(left.send(1, data(filled(size, 1))), "the send ends")
                        except TransportError as error:
                            text = str(error)
                        else:
                            raise AssertionError("a slot was made without a descriptor")
                        await soon(left.send(1, data(filled(100, 2), index=2)), "a message without a slot is sent")
                        assert index_of(await receive(right)) == 2
            assert descriptors() == opened
            await soon(left.send(1, data(filled(3 * MIB, 3), index=3)), "the window is free, the channel goes on")
            message = await receive(right)
            assert index_of(message) == 3
            assert torch.equal(only(message), filled(3 * MIB, 3))
            assert descriptors() == opened
            assert len(mappings()) == 2
        return text

    return asyncio.run(main())


def receiver_without_descriptors(spare: int) -> list[str]:
    """Returns the errors of ``receive``."""

    async def main() -> list[str]:
        errors = []
        async with shm_pair(PairOptions(queue_bytes=MIB)) as (left, right):
            opened = descriptors()
            for index in range(3):
                await soon(left.send(1, data(filled(MIB, index), index=index)), "the window is free again")
                # The message waits in the socket: nothing has run yet that could have read it.
                with no_more_descriptors(spare):
                    try:
                        await receive(right)
                    except TransportError as error:
                        errors.append(str(error))
            await soon(left.send(1, data(filled(MIB, 7), index=7)), "the channel goes on")
            message = await receive(right)
            assert index_of(message) == 7
            assert torch.equal(only(message), filled(MIB, 7))
            await until(lambda: left.statistics().queued_bytes == 0)
            assert left._links[1].outlets[Channel.FORWARD].pool.num_bytes == MIB
            assert len(mappings()) == 2
            assert descriptors() == opened
            assert right.statistics().dropped_frames == 3
        return errors

    return asyncio.run(main())


async def _three_messages() -> None:
    async with shm_pair() as (left, right):
        for size in (100, 100_000, 3 * MIB):
            _, message = await asyncio.gather(left.send(1, data(filled(size, 5))), receive(right))
            assert torch.equal(only(message), filled(size, 5))


def without_locked_memory() -> None:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
    asyncio.run(_three_messages())


def without_threads() -> int:
    """Returns how many threads there are."""
    threading.stack_size(1 << 46)  # more than a process can have
    asyncio.run(_three_messages())
    return threading.active_count()


def with_full_shared_memory_folder(options: str) -> object:
    """/dev/shm is read-only, or has no room."""
    if not unshare(NEW_MOUNTS):
        return NOT_PERMITTED
    ctypes.CDLL(None).mount(b"none", b"/", None, (1 << 14) | (1 << 18), None)  # private, recursively
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", "/dev/shm"]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        return NOT_PERMITTED
    asyncio.run(_three_messages())
    return None


def with_small_files() -> str:
    """Returns the error of a send."""

    async def main() -> str:
        async with shm_pair() as (left, right):
            resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
            try:
                await soon(left.send(1, data(filled(3 * MIB, 1))), "the send ends")
            except TransportError as error:
                text = str(error)
            await left.send(1, data(filled(MIB // 2, 2), index=2))
            assert index_of(await receive(right)) == 2
        return text

    return asyncio.run(main())


def hosts_with_small_files() -> list[str]:
    """Returns why `auto` would take no shared memory: for messages of the default's size, and for small ones."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    return [this_host().obstacle, this_host(MIB // 2).obstacle]


def host_that_reserves_no_memory() -> str:
    """Returns why `auto` would take no shared memory."""
    fallocate = {"x86_64": 285, "aarch64": 47}.get(platform.machine())
    return this_host().obstacle if fallocate is not None and refuse(fallocate) else NOT_PERMITTED


def start_without_descriptors() -> str:
    """Returns the error of a rank that may open no more files when it connects."""

    async def main() -> str:
        left, right = (ShmTransport(context) for context in contexts())
        starting = asyncio.create_task(left.start())
        await right.context.rendezvous.lookup(address_key(left.context, 0), 5)
        try:
            with no_more_descriptors(1):  # for its own listener
                await right.start()
        except TransportError as error:
            return str(error)
        finally:
            starting.cancel()
            await asyncio.wait({starting})
            left.abort()
            right.abort()
        return "it started"

    return asyncio.run(main())


def with_little_address_space() -> list[str]:
    """Returns the errors of a send, and of ``receive`` when only the sender has room for the slot."""

    async def main() -> list[str]:
        tensor, limits = filled(256 * MIB, 1), resource.getrlimit(resource.RLIMIT_AS)
        errors = []
        async with shm_pair(PairOptions(queue_bytes=512 * MIB)) as (left, right):
            await left.send(1, data(filled(2 * MIB, 1), index=1))  # starts the thread
            assert index_of(await receive(right)) == 1
            pages = int(open("/proc/self/statm").read().split()[0])  # noqa: SIM115, ASYNC230
            for room in (128, 384):
                gc.collect()
                resource.setrlimit(resource.RLIMIT_AS, (4096 * pages + room * MIB, limits[1]))
                try:
                    await soon(left.send(1, data(tensor, index=2)), "the send ends")
                    await receive(right)
                except TransportError as error:
                    errors.append(str(error))
            resource.setrlimit(resource.RLIMIT_AS, limits)
            await soon(left.send(1, data(tensor, index=3)), "the channel goes on")
            message = await receive(right)
            assert index_of(message) == 3
            assert torch.equal(only(message), tensor)
        return errors

    return asyncio.run(main())


def fork_with_a_received_tensor() -> None:
    """A forked child has a copy of the tensor. Its end must not give the parent's slot back."""

    async def main() -> None:
        async with shm_pair() as (left, right):
            pool = left._links[1].outlets[Channel.FORWARD].pool
            await left.send(1, data(filled(MIB, 1)))
            tensor = only(await receive(right))
            if (child := os.fork()) == 0:
                del tensor
                gc.collect()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0  # noqa: ASYNC222
            assert pool.free_slots() == []
            assert torch.equal(tensor, filled(MIB, 1))
            del tensor
            await until(lambda: len(pool.free_slots()) == 1)

    asyncio.run(main())


def connect_as(user: int, namespaces: int, address: str) -> object:
    """Connect as another user or from other namespaces; returns the error, or what arrives before the end."""
    if namespaces and not unshare(namespaces):
        return NOT_PERMITTED
    if user:
        if os.geteuid() != 0:
            return NOT_PERMITTED
        os.setuid(user)
    if namespaces == NEW_PIDS:
        return _in_new_pid_namespace(address)
    if user:  # without the check of this end
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(10)
            sock.connect(f"\0{address}")
            return sock.recv(100)
    return _error_of_connecting(address)


def write_as(user: int, endpoint: str, messages: list[list[bytes]]) -> object:
    """Connect a zmq socket as another user, and write; returns whether libzmq's connection ended."""
    if os.geteuid() != 0:
        return NOT_PERMITTED
    os.setuid(user)
    sockets = zmq.Context()
    socket = sockets.socket(zmq.DEALER)
    socket.setsockopt(zmq.ROUTING_ID, b"0/control")
    monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
    socket.connect(endpoint)
    with suppress(zmq.Again):  # the connection has ended between two messages, and no other has begun
        for message in messages:
            socket.send_multipart(message, zmq.NOBLOCK)
    refused = bool(monitor.poll(10_000))
    socket.disable_monitor()
    sockets.destroy(linger=0)
    return refused


def _error_of_connecting(address: str) -> str:
    try:
        connect(address)
    except (OSError, TransportError) as error:
        return str(error)
    return "connected"


def _in_new_pid_namespace(address: str) -> str:
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.write(write, _error_of_connecting(address).encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    return os.read(read, 1000).decode()


def squat(user: int, address: str, ready: str) -> object:
    """Listen at the address of a rank as another user, until somebody has connected and gone."""
    if os.geteuid() != 0:
        return NOT_PERMITTED
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        os.setuid(user)
        sock.bind(f"\0{address}")
        sock.listen()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as go:
            go.connect(f"\0{ready}")
            go.sendall(b"listening")
        sock.settimeout(10)
        visitor, _ = sock.accept()
        return visitor.recv(100)


__all__ = ["NEW_NETWORK", "NEW_PIDS"]
