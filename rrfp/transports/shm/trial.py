"""Whether shared memory works between two processes: facts that must be equal, and one slot passed back and forth."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from dataclasses import asdict, dataclass
from functools import partial

import msgpack

from rrfp import timeouts
from rrfp.errors import TransportError
from rrfp.host import boot_id, namespace, pidfd
from rrfp.log import RateLimitedLog, get_logger
from rrfp.transports.base import DEFAULT_MAX_MESSAGE_BYTES
from rrfp.transports.links.flow import HomeLoop
from rrfp.transports.shm.endpoint import Connected, Listener, connect
from rrfp.transports.shm.packets import BUFFER_BYTES, PacketSocket
from rrfp.transports.shm.slots import Slot, obstacle_of_limits, with_limit

_TOKEN_BYTES = 16
_SLOT = 1
_ROOM = 4096
_DONE = b"done"


@dataclass(frozen=True, slots=True)
class Host:
    """What two processes must have in common to share memory, and what each publishes beside it."""

    #: This start of this machine.
    boot: str
    #: The effective user's number.
    user: str
    user_namespace: str
    network_namespace: str
    pid_namespace: str
    #: Why shared memory does not work here at all; empty if it does.
    obstacle: str = ""
    #: Where it answers trials; empty if it does not.
    address: str = ""
    #: The way in which it shares its device's memory; empty if it does not.
    sharing: str = ""

    def pack(self) -> bytes:
        return bytes(msgpack.packb(asdict(self)))

    @classmethod
    def unpack(cls, rank: int, value: bytes) -> Host:
        """What a rank has published of its process; a TransportError if it is malformed."""
        try:
            fields = msgpack.unpackb(value)
            if not all(isinstance(each, str) for each in fields.values()):
                raise ValueError("all fields must be strings")
            return cls(**fields)
        except Exception as error:  # msgpack raises many types
            raise TransportError(
                f"rank {rank}, or another program, wrote {value!r:.200} to the store, which is malformed: {error}"
            ) from error


def this_host(max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES) -> Host:
    """The facts of this process, whose messages have ``max_message_bytes`` at most."""
    if sys.platform != "linux":
        return Host("", "", "", "", "", f"shared memory needs Linux, this is {sys.platform}")
    try:
        users, networks, processes = map(namespace, ("user", "net", "pid"))
        return Host(boot_id(), str(os.geteuid()), users, networks, processes, _obstacle(max_message_bytes))
    except OSError as error:
        return Host("", "", "", "", "", f"/proc does not say what a process shares with others: {error}")


def _obstacle(max_message_bytes: int) -> str:
    """Why this process cannot share memory at all; empty if it can."""
    if obstacle := obstacle_of_limits(max_message_bytes):
        return obstacle
    try:
        slot = Slot.make(_SLOT, _ROOM)
        slot.reserve()
        slot.close_descriptor()
        os.close(pidfd(os.getpid()))
    except OSError as error:
        return f"the system refuses what shared memory needs (memfd, pidfd): {with_limit(error)}"
    return ""


def obstacle_between(own: Host, other: Host) -> str:
    """Why two processes cannot share memory, before a trial; empty if they may."""
    if own.obstacle or other.obstacle:
        return own.obstacle or other.obstacle
    differing = {
        "it runs on another host": own.boot != other.boot,
        "it belongs to another user": own.user != other.user,
        "it is in another user namespace": own.user_namespace != other.user_namespace,
        "it is in another network namespace": own.network_namespace != other.network_namespace,
        "it is in another pid namespace": own.pid_namespace != other.pid_namespace,
    }
    return next((reason for reason, differs in differing.items() if differs), "")


def is_reached_by_ipc(own: Host, other: Host) -> bool:
    """Whether two processes may connect by a local address without a file."""
    return (own.boot, own.user, own.network_namespace) == (other.boot, other.user, other.network_namespace)


_log = get_logger(__name__)


class TrialAnswers:
    """Reverses the token in each slot that arrives. Used on one loop only."""

    def __init__(self, rank: int, home: HomeLoop) -> None:
        self._home = home
        self._open: set[PacketSocket] = set()
        self._buffer = bytearray(BUFFER_BYTES)
        self._listener = Listener(rank, home, self._on_connected, RateLimitedLog(_log).add)
        self.address = self._listener.address

    def _on_connected(self, connected: Connected) -> None:
        packets = PacketSocket(connected.sock, self._home)
        self._open.add(packets)
        packets.on_readable(partial(self._answer, packets))

    def _answer(self, packets: PacketSocket) -> None:
        packet = packets.read(self._buffer)
        if packet is None:
            return
        if packet.descriptor is not None:
            try:
                (token,) = Slot.open(_SLOT, _ROOM, packet.descriptor).frames([_TOKEN_BYTES])
                token[:] = bytes(token)[::-1]
                packets.post([_DONE])
                return  # the other side closes
            except (OSError, ValueError):
                pass  # which the other side sees by the end of the connection
            finally:
                os.close(packet.descriptor)
        self._open.discard(packets)
        packets.close()

    def close(self) -> None:
        """Answer no more. May be called twice."""
        self._listener.close()
        for packets in self._open:
            packets.close()
        self._open.clear()


async def try_slot(address: str, home: HomeLoop, timeout_s: float) -> str:
    """Pass a slot to the rank at ``address``; why it failed, if it did."""
    try:
        async with asyncio.timeout(timeout_s):
            return await _try_slot(address, home)
    except TimeoutError:
        return f"passing shared memory took more than {timeout_s:g} s"
    except (OSError, TransportError) as error:
        return f"passing shared memory failed: {with_limit(error) if isinstance(error, OSError) else error}"


async def _try_slot(address: str, home: HomeLoop) -> str:
    while (connected := connect(address)) is None:  # noqa: ASYNC110 - its backlog is full: no event says when it is not
        await asyncio.sleep(timeouts.LAST_PAUSE_S)
    packets, readable = PacketSocket(connected.sock, home), asyncio.Event()
    try:
        slot, token = Slot.make(_SLOT, _ROOM), secrets.token_bytes(_TOKEN_BYTES)
        slot.frames([_TOKEN_BYTES])[0][:] = token
        packets.on_readable(readable.set)
        await packets.send([b"slot"], slot.descriptor)
        buffer = bytearray(BUFFER_BYTES)
        while (packet := packets.read(buffer)) is None:
            readable.clear()
            await readable.wait()
        answered = buffer[: packet.size] == _DONE
        arrived = bytes(slot.frames([_TOKEN_BYTES])[0]) == token[::-1]
        return "" if answered and arrived else "passing shared memory failed: the other process could not map it"
    finally:
        packets.close()
