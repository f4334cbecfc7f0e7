"""Strangers that attack the open ports of a running job until they are stopped."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import msgpack
import zmq

from rrfp.transports.base import MessageKind
from rrfp.transports.wire.codec import VERSION

#: Bytes that a stranger sends at once, at most.
_MOST_BYTES = 1 << 16

#: Between two attacks of a stranger: the job shares the machine with all of them.
_PAUSE_S = 0.01

#: The run of the job, and another one.
_RUNS = ("test", "before")

#: ZMTP 3.0 without security: the greeting, then READY of a DEALER; and a frame of 1 MiB that another one follows.
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
_ENDLESS = b"\x03" + (1 << 20).to_bytes(8, "big") + bytes(1 << 20)


class _Stranger:
    """One attack on one address, over and over, in a thread."""

    def __init__(self, attack: Callable[[str, random.Random], None], address: str, seed: int) -> None:
        self._attack, self._address, self._random = attack, address, random.Random(seed)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{attack.__name__}-{seed}")
        self.count = 0
        self._thread.start()

    def _run(self) -> None:
        while not self._done.wait(_PAUSE_S):
            with suppress(OSError):  # the job has ended, or has turned it away
                self._attack(self._address, self._random)
                self.count += 1

    def stop(self) -> None:
        self._done.set()
        self._thread.join()


def frames(address: str, draw: random.Random) -> None:
    """A plain connection that says it is a rank, greets, and sends noise and what a rank would send."""
    _connect(address, draw, lambda _: None)


def keys(address: str, draw: random.Random) -> None:
    """The same with keys that nobody vouched for."""

    def lock(sock: zmq.Socket[bytes]) -> None:
        public, private = zmq.curve_keypair()
        sock.curve_publickey, sock.curve_secretkey = public, private
        sock.curve_serverkey = zmq.curve_keypair()[0]

    _connect(address, draw, lock)


def noise(address: str, draw: random.Random) -> None:
    """Bytes that are no zmq at all, or begin as if they were."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5) as sock:
        start = draw.choice([b"", b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE".ljust(24, b"\0")])
        sock.sendall(start + draw.randbytes(draw.randrange(_MOST_BYTES)))


def _connect(address: str, draw: random.Random, lock: Callable[[zmq.Socket[bytes]], None]) -> None:
    context = zmq.Context()
    try:
        sock = context.socket(zmq.DEALER)
        sock.setsockopt(zmq.ROUTING_ID, draw.choice([b"rrfp-0-control", b"1", draw.randbytes(8)]))
        lock(sock)
        sock.connect(address)
        for _ in range(20):
            with suppress(zmq.Again):
                sock.send_multipart(_parts(draw), zmq.NOBLOCK)
        sock.poll(20)
    finally:
        context.destroy(linger=20)


def flood(address: str, draw: random.Random) -> None:
    """One message without end."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5) as sock:
        sock.sendall(_GREETING + _READY)
        with suppress(OSError):  # refused in the handshake, as it should be
            for _ in range(32):
                sock.sendall(_ENDLESS)


def _parts(draw: random.Random) -> list[bytes]:
    """Of one message: noise, or a header as a rank writes it in this run or another."""
    if draw.random() < 0.5:
        return [draw.randbytes(draw.randrange(200)) for _ in range(draw.choice([1, 2, 50]))]
    kind = draw.choice(["hello", MessageKind.ABORT.value, MessageKind.OUTPUT.value])
    sender = draw.randrange(-1, 4)
    return [msgpack.packb([VERSION, draw.choice(_RUNS), 0, sender, kind, "control"]), draw.randbytes(8)]


@contextmanager
def attacked(addresses: Sequence[str]) -> Iterator[Sequence[_Stranger]]:
    """Each address by every kind of stranger."""
    strangers = [
        _Stranger(attack, address, number)
        for number, address in enumerate(addresses)
        for attack in (frames, keys, noise, flood)
    ]
    try:
        yield strangers
    finally:
        for each in strangers:
            each.stop()
