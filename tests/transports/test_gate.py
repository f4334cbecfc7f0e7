"""The gate answers every connection, also one that asks while it answers another."""

from __future__ import annotations

import asyncio
import select
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq
from zmq.utils import z85

from rrfp.transports.zmq.security import Gate, guard

Sockets = zmq.Context[zmq.Socket[bytes]]


@contextmanager
def contexts() -> Iterator[tuple[Sockets, Sockets]]:
    """Those of a listener and of its clients."""
    both: tuple[Sockets, Sockets] = zmq.Context(), zmq.Context()
    try:
        yield both
    finally:
        for each in both:
            each.destroy(linger=0)


@pytest.mark.allow_blocking(reason="the loop is busy while a second connection asks")
async def test_a_connection_that_asks_while_a_key_is_admitted_is_answered() -> None:
    with contexts() as (sockets, clients):
        gate = Gate(sockets, pytest.fail)
        (server_key, server_secret), (key, secret) = zmq.curve_keypair(), zmq.curve_keypair()
        listener = sockets.socket(zmq.ROUTER)
        guard(listener)
        listener.setsockopt(zmq.CURVE_SERVER, 1)
        listener.setsockopt(zmq.CURVE_SECRETKEY, server_secret)
        opened = [listener]
        port = listener.bind_to_random_port("tcp://127.0.0.1")

        def greet(text: bytes) -> None:
            client = clients.socket(zmq.DEALER)
            client.setsockopt(zmq.CURVE_SERVERKEY, server_key)
            client.setsockopt(zmq.CURVE_PUBLICKEY, key)
            client.setsockopt(zmq.CURVE_SECRETKEY, secret)
            client.connect(f"tcp://127.0.0.1:{port}")
            client.send(text)
            opened.append(client)

        try:
            greet(b"first")
            async with asyncio.timeout(10):
                while not gate._waiting:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            greet(b"second")
            assert select.select([gate._fd], [], [], 10) == ([gate._fd], [], [])
            time.sleep(0.01)  # noqa: ASYNC251 -- a send takes in what has arrived once a millisecond at most
            gate.admit_key(1, z85.decode(key))
            texts = set[bytes]()
            async with asyncio.timeout(10):
                while len(texts) < 2:
                    await asyncio.sleep(0.001)
                    if listener.poll(0):
                        texts.add(listener.recv_multipart()[-1])
            assert texts == {b"first", b"second"}
        finally:
            gate.close()
            for socket in opened:
                socket.close(linger=0)
