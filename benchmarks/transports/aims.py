"""What shm should be: near memcpy, near a bare socket, and ahead of zmq."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from benchmarks.shared.figures import Aim
from benchmarks.transports.rounds import Rounds
from benchmarks.transports.settings import KIB, MEMCPY, MIB, SHM, SOCKET_HOP, ZMQ_IPC, Kind, name_of

#: All figures are in here.
Results = Mapping[tuple[int, Kind], Rounds]

MEMCPY_SHARE = 60.0
ABOVE_SOCKET_US = 90.0
#: Processor time over zmq's, in percent, by size.
CPU_SHARES = {2 * MIB: 40.0, 32 * MIB: 25.0, 128 * MIB: 25.0}


@dataclass(frozen=True, slots=True)
class Comparison:
    """shm beside zmq over ipc in one figure.

    Attributes:
        figure: its name.
        ahead: how many times better shm is.
    """

    figure: str
    ahead: float


def comparisons(results: Results) -> list[Comparison]:
    """Latency, throughput and processor time at every size."""
    return [
        Comparison(f"{name_of(size)}, {name}", ahead)
        for (size, kind), rounds in results.items()
        for name, ahead in _compare(kind, rounds)
    ]


def _compare(kind: Kind, rounds: Rounds) -> Iterator[tuple[str, float]]:
    if kind.is_latency:
        yield f"latency, {kind}", rounds.faster(SHM, ZMQ_IPC)
    else:
        yield f"throughput, {kind}", rounds.faster(SHM, ZMQ_IPC)
        yield f"CPU, {kind}", 1 / rounds.cpu_ratio(SHM, ZMQ_IPC)


def aims_of(results: Results) -> list[Aim]:
    """Each with its verdict."""
    copying = results[32 * MIB, Kind.UNREAD]
    small = results[4 * KIB, Kind.IDLE]
    aims = [
        Aim("shm's throughput over memcpy's, 32 MiB", 100 / copying.faster(MEMCPY, SHM), MEMCPY_SHARE, "at least", "%"),
        Aim(
            f"shm's latency above {SOCKET_HOP}, 4 KiB", small.later_s(SHM, SOCKET_HOP) * 1e6, ABOVE_SOCKET_US, unit="us"
        ),
    ]
    for size, share in CPU_SHARES.items():
        if (size, Kind.UNREAD) not in results:
            continue  # a smoke run
        ratio = results[size, Kind.UNREAD].cpu_ratio(SHM, ZMQ_IPC)
        aims.append(Aim(f"shm's CPU over zmq ipc's, {name_of(size)}", 100 * ratio, share, unit="%"))
    figures = comparisons(results)
    behind = sum(each.ahead <= 1 for each in figures)
    aims.append(Aim(f"shm ahead of zmq ipc everywhere: figures of {len(figures)} in which it is not", behind, 0))
    return aims
