"""The aims for RRFP, beside the other systems in the same run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from benchmarks.peers.settings import (
    METHODS,
    PEERS_OF_1F1B,
    STRICT_1F1B,
    TORCH_ZBV,
    V_N,
    peer_in_cpu,
    peer_in_time,
)
from benchmarks.shared.comparison import Cell, Runtime
from benchmarks.shared.figures import Aim
from benchmarks.shared.step_figures import Figures, Results

#: Points of the step over its own order, beyond the peer's for its own; strict 1f1b is to be ahead.
MOST_POINTS, MOST_POINTS_WHOLE = 0.0, -1.0
#: The most points, and the most percent of what the orders alone give, that need no explanation.
TOLERATED_POINTS, TOLERATED_BEHIND = 1.0, 103.0
#: Percent of another system's 1F1B that strict 1f1b may take.
MOST_STRICT = 102.0
#: Percent of the peer's processor time a task: the aim, and the most that needs no profile.
MOST_CPU, TOLERATED_CPU = 100.0, 120.0
#: Percent of torch ZBV's time of a step, by jitter.
MOST_V = {"J0": 100.0, "J3": 95.0}
MOST_END_MS = 2.0

OVER, OVER_TOLERATED, BEHIND, STRICT, CPU, TOLERATED, V_OVER_ZBV, END = (
    "over own order, beyond the peer's",
    "over own order, beyond the peer's (tolerated)",
    "time over the peer's, of the orders' alone (tolerated)",
    "time, of that of",
    "CPU a task, of the peer's",
    "CPU a task, of the peer's (tolerated)",
    "time, of torch ZBV's",
    "step end",
)


@dataclass(frozen=True, slots=True)
class CellAim:
    """An aim in one cell.

    Attributes:
        kind: what it is about.
        method: whose.
        cell: where.
        aim: with its verdict; None where a step that it needs was always disturbed.
    """

    kind: str
    method: str
    cell: Cell
    aim: Aim | None


def aims_of(results: Results) -> list[CellAim]:
    """All aims of the methods that were measured."""
    return [
        CellAim(kind, method, cell, aim)
        for cell, figures in results.items()
        for method, own in figures.items()
        if METHODS[method].runtime is Runtime.RRFP
        for kind, aim in _aims(cell, method, own, figures)
    ]


def _aims(cell: Cell, method: str, own: Figures, figures: Mapping[str, Figures]) -> Iterator[tuple[str, Aim | None]]:
    def aim(kind: str, value: float, limit: float, unit: str, *, is_disturbed: bool) -> tuple[str, Aim | None]:
        return kind, None if is_disturbed else Aim(f"{method}, {kind}, {cell}", value, limit, unit=unit)

    way = METHODS[method]
    in_time, in_cpu = figures.get(peer_in_time(way)), figures.get(peer_in_cpu(way))
    if in_time is not None:
        beyond = 100 * (own.overhead.total - in_time.overhead.total)
        most, disturbed = (
            MOST_POINTS_WHOLE if method == STRICT_1F1B else MOST_POINTS,
            own.is_disturbed or in_time.is_disturbed,
        )
        yield aim(OVER, beyond, most, "points", is_disturbed=disturbed)
        yield aim(OVER_TOLERATED, beyond, TOLERATED_POINTS, "points", is_disturbed=disturbed)
        ratio = own.per_peer[peer_in_time(way)]
        yield aim(BEHIND, 100 * ratio.value / ratio.alone, TOLERATED_BEHIND, "%", is_disturbed=ratio.is_disturbed)
    for peer in PEERS_OF_1F1B:
        if method == STRICT_1F1B and peer in own.per_peer:
            ratio = own.per_peer[peer]
            yield aim(f"{STRICT} {peer}", 100 * ratio.value, MOST_STRICT, "%", is_disturbed=ratio.is_disturbed)
    if in_cpu is not None:
        share = 100 * own.cpu_per_task / in_cpu.cpu_per_task
        for kind, most in ((CPU, MOST_CPU), (TOLERATED, TOLERATED_CPU)):
            yield aim(kind, share, most, "%", is_disturbed=own.is_disturbed or in_cpu.is_disturbed)
    if method == V_N and TORCH_ZBV in own.per_peer and cell.jitter in MOST_V:
        ratio = own.per_peer[TORCH_ZBV]
        yield aim(V_OVER_ZBV, 100 * ratio.value, MOST_V[cell.jitter], "%", is_disturbed=ratio.is_disturbed)
    yield aim(END, 1e3 * own.end_s, MOST_END_MS, "ms", is_disturbed=own.is_disturbed)
