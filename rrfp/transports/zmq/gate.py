"""Decides which connections a rank accepts, and to which rank each belongs.

libzmq asks before it reads anything else of a connection (ZAP, https://rfc.zeromq.org/spec/27). So of an
unauthenticated sender nothing is stored, and every frame that arrives carries the rank that was authenticated, as its
User-Id. A zmq context has one such handler.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Sequence
from typing import NamedTuple

import zmq

_ENDPOINT = "inproc://zeromq.zap.01"
_DOMAIN = b"rrfp"
_NOBLOCK = int(zmq.NOBLOCK)

_ACCEPTED, _REFUSED = b"200", b"400"

#: Connections with unknown keys that wait until all peers' keys are known: libzmq lets no refused one try again.
_MAX_WAITING = 1024


class _Request(NamedTuple):
    """libzmq's question about one connection; ``envelope`` leads the answer back."""

    envelope: list[bytes]
    address: bytes
    mechanism: bytes
    credentials: list[bytes]


class Gate:
    """libzmq's authentication handler. Create it before a listener binds."""

    def __init__(self, sockets: zmq.Context[zmq.Socket[bytes]], on_rejected: Callable[[str], None]) -> None:
        self._on_rejected = on_rejected
        self._keys: dict[bytes, int] = {}
        self._passwords: dict[bytes, tuple[int, bytes]] = {}
        self._knows_all = False
        self._waiting: list[_Request] = []
        self._loop = asyncio.get_running_loop()
        self._socket = sockets.socket(zmq.ROUTER)  # not REP: some answers come later
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ENDPOINT)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._closed = False
        self._loop.add_reader(self._fd, self._answer_all)

    def admit_key(self, rank: int, key: bytes) -> None:
        """Connections with this CURVE public key, 32 bytes, are those of ``rank``."""
        self._keys[key] = rank
        self._answer_waiting()

    def admit_password(self, rank: int, password: bytes) -> None:
        """Plain connections of ``rank`` have this password."""
        self._passwords[str(rank).encode()] = (rank, password)

    def close_list(self) -> None:
        """All peers' keys are admitted; unknown ones are refused from now on."""
        self._knows_all = True
        self._answer_waiting()

    def _answer_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            self._decide(request)
        # A send takes in what has arrived, too: the descriptor does not fire again for a request that came meanwhile.
        self._answer_all()

    def _answer_all(self) -> None:
        while not self._closed:
            try:
                parts = self._socket.recv_multipart(_NOBLOCK)
            except zmq.Again:  # the descriptor is edge-triggered: so everything was read
                return
            # Routing id, empty delimiter, version, request, domain, address, identity, mechanism, credentials.
            self._decide(_Request(parts[:4], parts[5], parts[7], parts[8:]))

    def _decide(self, request: _Request) -> None:
        rank = self._rank_of(request.mechanism, request.credentials)
        if rank is not None:
            self._answer(request, _ACCEPTED, str(rank).encode())
        elif request.mechanism == b"CURVE" and not self._knows_all and len(self._waiting) < _MAX_WAITING:
            self._waiting.append(request)
        else:
            self._answer(request, _REFUSED, b"")
            self._on_rejected(f"refused a connection from {request.address!r:.60} without a rank's key or password")

    def _answer(self, request: _Request, status: bytes, name: bytes) -> None:
        self._socket.send_multipart([*request.envelope, status, b"", name, b""], _NOBLOCK)

    def _rank_of(self, mechanism: bytes, credentials: Sequence[bytes]) -> int | None:
        if mechanism == b"CURVE" and len(credentials) == 1:
            return self._keys.get(credentials[0])
        if mechanism == b"PLAIN" and len(credentials) == 2:
            rank, password = self._passwords.get(credentials[0], (None, b""))
            return rank if hmac.compare_digest(password, credentials[1]) else None
        return None

    def close(self) -> None:
        """Answer no more. May be called twice."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._fd)
            self._socket.close(linger=0)


def guard(listener: zmq.Socket[bytes]) -> None:
    """Have libzmq ask the gate about every connection to ``listener``."""
    listener.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
    listener.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def authenticated_rank(frame: zmq.Frame) -> int | None:
    """The rank whose connection brought a frame; None if no gate let it in."""
    try:
        return int(frame.get("User-Id"))
    except (zmq.ZMQError, ValueError):
        return None
