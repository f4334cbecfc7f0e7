"""The user at the other end of a Unix socket, as the kernel has it."""

from __future__ import annotations

import socket
import struct

#: Process, user, group.
_CREDENTIALS = struct.Struct("=iII")

#: Whether this system tells; Linux does.
KNOWN = hasattr(socket, "SO_PEERCRED")


def user_at(sock: socket.socket) -> int:
    """The user id of the process that connected, or that listens, at the other end."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return int(user)
