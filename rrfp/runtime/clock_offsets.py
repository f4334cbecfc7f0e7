"""How far the clock of a rank is from that of rank 0.

Ranks of one host share a monotonic clock. Between hosts these clocks have nothing in common, so a rank measures: rank 0
reads its clock after the rank has sent a contribution and before the rank has the answer. The true difference lies
between the two readings of the rank's own clock, and is known to half their distance, whatever the network does.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rrfp.runtime.processes import ProcessIdentity

#: Round trips of a measurement; the shortest one counts.
ROUND_TRIPS = 8


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """A rank's clock plus ``seconds`` is the clock of rank 0, to at most ``error_s`` more or less."""

    seconds: float = 0.0
    error_s: float = 0.0


@dataclass(frozen=True, slots=True)
class HostClock:
    """The ranks that share a clock, and how far it is from that of rank 0."""

    host: str
    ranks: tuple[int, ...]
    offset: ClockOffset


async def measure_offset(now: Callable[[], float], ask: Callable[[], Awaitable[float]]) -> ClockOffset:
    """Measure the offset of this rank's clock.

    Args:
        now: this rank's clock, in seconds.
        ask: returns a reading of rank 0's clock, made between the call and the return. All ranks call it equally often.
    """
    readings = []
    for _ in range(ROUND_TRIPS):
        before = now()
        theirs = await ask()
        after = now()
        readings.append(((after - before) / 2, theirs - (before + after) / 2))
    error, seconds = min(readings)
    return ClockOffset(seconds, error)


def host_clocks(clocks: Sequence[tuple[str, str]], offsets: Sequence[ClockOffset]) -> list[HostClock]:
    """The clocks of all ranks, that of rank 0 first.

    Args:
        clocks: for each rank the identity of its clock, and the name of its host.
        offsets: as each rank measured its own; the ranks of a host share the best one.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, (clock, _) in enumerate(clocks):
        ranks_of.setdefault(clock, []).append(rank)
    best = [min((offsets[rank] for rank in ranks), key=lambda offset: offset.error_s) for ranks in ranks_of.values()]
    best[0] = ClockOffset()
    hosts = [clocks[ranks[0]][1] for ranks in ranks_of.values()]
    return [HostClock(*each) for each in zip(hosts, map(tuple, ranks_of.values()), best, strict=True)]


def own_clock() -> str:
    """What ranks with the same monotonic clock have in common: the start of the host, and the space of its times."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/time')}"
    return ProcessIdentity.own().host
