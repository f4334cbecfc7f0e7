"""The transports, sizes and counts of the comparison; shared by its command and its processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

KIB, MIB = 1 << 10, 1 << 20

INPROC, SHM, ZMQ_IPC, ZMQ_TCP, ZMQ_CURVE = "inproc", "shm", "zmq ipc", "zmq tcp", "zmq tcp CURVE"
GLOO, SOCKET, SOCKET_HOP, MEMCPY = "gloo", "bare SEQPACKET", "bare SEQPACKET + hop", "memcpy"

#: Of bare sockets; larger messages take several. RRFP's shm sends tensors in datagrams up to this size.
DATAGRAM_BYTES = 64 * KIB

#: Ways that exchange messages, and those that move bytes.
LATENCY_WAYS = (INPROC, SHM, ZMQ_IPC, ZMQ_TCP, ZMQ_CURVE, GLOO, SOCKET, SOCKET_HOP)
STREAM_WAYS = (INPROC, SHM, ZMQ_IPC, ZMQ_TCP, ZMQ_CURVE, GLOO, SOCKET, MEMCPY)

#: What encryption costs.
TCP_WAYS = (ZMQ_TCP, ZMQ_CURVE)


class Kind(StrEnum):
    """The measured quantity, and its circumstances."""

    IDLE = "idle"
    BUSY = "busy"
    UNREAD = "unread"
    READ = "read"

    @property
    def is_latency(self) -> bool:
        """Round trips, rather than a stream of messages."""
        return self in (Kind.IDLE, Kind.BUSY)

    def ways(self, size: int) -> Sequence[str]:
        """Those that are compared, at a size."""
        if not self.is_latency:
            return STREAM_WAYS
        return LATENCY_WAYS if size <= DATAGRAM_BYTES else LATENCY_WAYS[:-1]


class Counts(NamedTuple):
    """Messages of one block.

    Attributes:
        idle: round trips while the lanes are idle.
        busy: round trips while the lanes compute.
        stream: messages one behind the other.
    """

    idle: int
    busy: int
    stream: int

    def of(self, kind: Kind) -> int:
        """The count for ``kind``."""
        return {Kind.IDLE: self.idle, Kind.BUSY: self.busy}.get(kind, self.stream)


#: By size of the tensor in bytes.
FULL: Mapping[int, Counts] = {
    4 * KIB: Counts(250, 150, 400),
    64 * KIB: Counts(200, 60, 300),
    256 * KIB: Counts(60, 30, 120),
    2 * MIB: Counts(20, 10, 40),
    32 * MIB: Counts(3, 2, 5),
    128 * MIB: Counts(1, 1, 2),
}
#: The largest messages take seconds even so.
QUICK: Mapping[int, Counts] = {size: Counts(2, 1, 2) for size in FULL if size <= 32 * MIB}


class Block(NamedTuple):
    """One way in one round; rounds below 0 warm up."""

    size: int
    kind: Kind
    number: int
    way: str


@dataclass(frozen=True, slots=True)
class Settings:
    """One comparison.

    Attributes:
        rounds: measured rounds of each size and kind; each runs every way once.
        counts: by size.
        warm_up: rounds before the measured ones.
        only: the ways that take part; None: all.
    """

    rounds: int = 8
    counts: Mapping[int, Counts] = field(default_factory=lambda: FULL)
    warm_up: int = 1
    only: Sequence[str] | None = None

    def ways(self, size: int, kind: Kind) -> list[str]:
        """Those that are compared, at a size."""
        return [way for way in kind.ways(size) if self.only is None or way in self.only]

    def plan(self) -> Iterator[list[Block]]:
        """The rounds, in order. The first way of a round changes."""
        for size in self.counts:
            for kind in Kind:
                ways = self.ways(size, kind)
                for number in range(-self.warm_up, self.rounds):
                    first = number % len(ways)
                    yield [Block(size, kind, number, way) for way in (*ways[first:], *ways[:first])]


def name_of(size: int) -> str:
    """A size for people."""
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"
