"""Sockets between two ranks of one host: an abstract address to find each other, and who is at the other end.

Abstract addresses have no file, so even SIGKILL leaves none behind. They have no permissions either: so the address is
hard to guess, and both ends ask the kernel for the other's user.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable
from typing import NamedTuple

from rrfp.errors import TransportError
from rrfp.host import peer_credentials
from rrfp.log import get_logger
from rrfp.transports.links.flow import HomeLoop
from rrfp.transports.shm.slots import with_limit

_log = get_logger(__name__)

#: Connections accepted in one turn of the loop: a flood of them must not keep it from the ranks.
_BATCH = 32

#: This process may open no more files: a pause before the next attempt.
_PAUSE_S = 0.1


class Connected(NamedTuple):
    """A connected socket, and the process at its other end."""

    sock: socket.socket
    process: int


def connect(address: str) -> Connected | None:
    """Connect to a listening rank; None while it has too many connections waiting."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.setblocking(False)
        sock.connect(f"\0{address}")
        return Connected(sock, _process_at(sock))
    except BlockingIOError:
        sock.close()
        return None
    except BaseException:
        sock.close()
        raise


def _process_at(sock: socket.socket) -> int:
    pid, user = peer_credentials(sock)
    if user != os.geteuid():
        raise TransportError(f"the process at the other end belongs to user {user}, must be {os.geteuid()}")
    if pid == 0:
        raise TransportError("the process at the other end is in another pid namespace; use transport zmq")
    return pid


class Listener:
    """Accepts connections at an address of its own. Used on one loop only."""

    def __init__(
        self,
        rank: int,
        home: HomeLoop,
        on_connected: Callable[[Connected], None],
        on_rejected: Callable[[str], None],
    ) -> None:
        self._loop = home.loop
        self._on_connected = on_connected
        self._on_rejected = on_rejected
        self.address = f"rrfp-shm-{rank}-{secrets.token_hex(16)}"
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.setblocking(False)
        try:
            self._sock.bind(f"\0{self.address}")
            self._sock.listen()
        except OSError as error:
            self._sock.close()
            raise TransportError(f"cannot listen on a Unix socket: {with_limit(error)}") from error
        self._listen()

    def _listen(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.add_reader(self._sock.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(_BATCH):
            if self._sock.fileno() < 0:  # closed by a connection
                return
            try:
                sock, _ = self._sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                _log.warning("a connection was not accepted: %s", error)
                self._loop.remove_reader(self._sock.fileno())  # else the loop would do nothing else
                self._loop.call_later(_PAUSE_S, self._listen)
                return
            try:
                self._on_connected(Connected(sock, _process_at(sock)))
            except TransportError as error:
                sock.close()
                self._on_rejected(f"a connection was refused: {error}")

    def close(self) -> None:
        """Accept nothing more. May be called twice."""
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()
