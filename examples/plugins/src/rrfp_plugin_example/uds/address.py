"""Addresses of unix domain sockets without a file, and the users behind them.

An abstract address (Linux) exists as long as its socket is open: even SIGKILL leaves nothing in the file system. Such
addresses have no permissions and every user can list them, so both ends ask the kernel which user is at the other one.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import sys

from rrfp.errors import ConfigError, TransportError

_CREDENTIALS = struct.Struct("3i")  # process, user, group


def listen(rank: int, peers: int) -> tuple[socket.socket, bytes]:
    """A socket that accepts connections, and its address.

    Args:
        rank: a part of the address, for a reader of the list of addresses.
        peers: how many ranks may connect at once.

    Raises:
        ConfigError: on another system than Linux.
    """
    if sys.platform != "linux":
        raise ConfigError("transport is 'uds', which needs Linux: use zmq")
    address = f"\0rrfp-uds-{rank}-{secrets.token_hex(16)}".encode()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.setblocking(False)
    listener.bind(address)
    listener.listen(max(8, 3 * peers))
    return listener, address


def connect(address: bytes) -> socket.socket:
    """A connection to ``address``, made at once: within a host the kernel completes it.

    Raises:
        TransportError: if no socket listens there, or another user does.
        BlockingIOError: the listener's queue is full: try again.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        connection.connect(address)
        if not is_own_user(connection):
            raise TransportError("another user listens at the published address")
    except BlockingIOError:
        connection.close()
        raise
    except OSError as error:
        connection.close()
        raise TransportError(f"no socket listens at the published address: {error}") from error
    except TransportError:
        connection.close()
        raise
    return connection


def is_own_user(connection: socket.socket) -> bool:
    """Whether the process at the other end runs as this user."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(raw)
    return bool(user == os.geteuid())
