"""Strangers that attack the open ports of a running job until they are stopped."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import zmq

#: Bytes that a stranger sends at once, at most.
_MOST_BYTES = 1 << 16


class _Stranger:
    """One attack on one address, over and over, in a thread."""

    def __init__(self, attack: Callable[[str, random.Random], None], address: str, seed: int) -> None:
        self._attack, self._address, self._random = attack, address, random.Random(seed)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{attack.__name__}-{seed}")
        self.count = 0
        self._thread.start()

    def _run(self) -> None:
        while not self._done.is_set():
            with suppress(OSError):  # the job has ended, or has turned it away
                self._attack(self._address, self._random)
                self.count += 1

    def stop(self) -> None:
        self._done.set()
        self._thread.join()


def frames(address: str, draw: random.Random) -> None:
    """A plain connection that says it is a rank, greets, and sends what is like a message."""
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
            parts = [draw.randbytes(draw.randrange(200)) for _ in range(draw.choice([1, 2, 50]))]
            with suppress(zmq.Again):
                sock.send_multipart(parts, zmq.NOBLOCK)
        sock.poll(20)
    finally:
        context.destroy(linger=20)


@contextmanager
def attacked(addresses: Sequence[str]) -> Iterator[Sequence[_Stranger]]:
    """Each address by every kind of stranger."""
    strangers = [
        _Stranger(attack, address, number)
        for number, address in enumerate(addresses)
        for attack in (frames, keys, noise)
    ]
    try:
        yield strangers
    finally:
        for each in strangers:
            each.stop()
