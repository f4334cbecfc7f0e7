"""The endpoint on which a rank listens: an ipc address within a host, tcp between hosts.

Abstract addresses (Linux) have no file, so even SIGKILL leaves none behind; libzmq admits only processes of this user.
On other systems the address is a file in a folder that only this user may open.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from rrfp.errors import ConfigError, TransportError
from rrfp.transports.base import TransportContext
from rrfp.transports.rendezvous import in_thread
from rrfp.transports.zmq.security import check_plain_tcp

LOOPBACK = "127.0.0.1"

#: The address within a host.
IPC = "ipc"

_HAS_ABSTRACT_ADDRESSES = sys.platform == "linux"


async def choose_address(context: TransportContext, address: str | None) -> str:
    """The address to bind: ``ipc``, or the IP address of an interface where that is permitted."""
    if address == IPC or (address is None and context.single_host):
        return IPC
    chosen = await in_thread(interface_towards_master if address is None else partial(_resolve, address))
    check_plain_tcp(context, chosen)
    return chosen


def bind(listener: zmq.Socket[bytes], address: str, rank: int) -> str:
    """Bind ``listener`` to ``address``; returns the endpoint for the peers, or raises a TransportError."""
    if address == IPC:
        _admit_own_user_only(listener)
        if _HAS_ABSTRACT_ADDRESSES:
            wanted = f"ipc://@rrfp-{rank}-{secrets.token_hex(16)}"
        else:
            wanted = f"ipc://{tempfile.mkdtemp(prefix='rrfp-')}/{rank}"
    elif ":" in address:
        listener.setsockopt(zmq.IPV6, 1)
        wanted = f"tcp://[{address}]:*"
    else:
        wanted = f"tcp://{address}:*"
    try:
        listener.bind(wanted)
    except zmq.ZMQError as error:
        raise TransportError(f"cannot listen on {wanted}: {error}") from error
    endpoint: Any = listener.getsockopt(zmq.LAST_ENDPOINT)
    return bytes(endpoint).rstrip(b"\0").decode()


def unbind(endpoint: str) -> None:
    """Remove the file and the folder of a closed listener, if it has them."""
    if endpoint.startswith("ipc:///"):
        path = Path(endpoint.removeprefix("ipc://"))
        with suppress(OSError):
            path.unlink(missing_ok=True)  # libzmq removes it already
            path.parent.rmdir()


def _admit_own_user_only(listener: zmq.Socket[bytes]) -> None:
    option = getattr(zmq, "IPC_FILTER_UID", None)
    if option is not None:
        with suppress(zmq.ZMQError):  # libzmq may be built without it: then the address is only hard to guess
            listener.setsockopt(option, os.getuid())


def _resolve(host: str) -> str:
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(f"zmq address is {host!r}, must be 'ipc' or an address of this machine: {error}") from error


def interface_towards_master() -> str:
    """The address of the interface from which this host reaches MASTER_ADDR."""
    master = os.environ.get("MASTER_ADDR", LOOPBACK)
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # of a UDP socket: chooses the route and sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise TransportError(f"no route to MASTER_ADDR {master!r}: {error}") from error
