"""Tensor parallelism simulated: a leader against agreement. Takes about 3 minutes on 2 cores.

    python benchmarks/tp_simulated/run.py [--seeds N] [--quick] [--json]

PP 8, 64 microbatches, profile mllm, spike latency drawn anew for every rank, limit 2N; bf on whole and bfw on split
backwards. A message from rank to rank takes 60 us, so a round of agreement 120 us. All makespans are relative to the
leader's (depth 1) on the same draw: the mean of the seeds +- their standard deviation.

coordination: the cost of one order for all ranks. In "leader (free)" and "agreement (free)" coordination takes no time;
the difference between the two is the cost of agreement's worse decisions. "coord." is the part of the step in which a
task was ready on all ranks of a stage and its lanes were idle. "failed" are rounds per task in which two ranks proposed
different tasks. "messages" are messages between ranks of one group, per task. "1f1b" is the strict schedule, unsplit,
which needs no coordination and less memory.

slower control: the same with slower messages; tasks take 10 to 30 ms.

`--quick` only shows that everything runs: its figures mean nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import islice
from statistics import fmean, pstdev

from rich.console import Console
from rich.table import Table

from benchmarks.shared.figures import table_of
from benchmarks.shared.load import OtherLoad
from benchmarks.shared.options import parsed, parser_of
from benchmarks.tp_simulated.ways import (
    AGREEMENT,
    AHEAD,
    FREE_AGREEMENT,
    HINTS,
    LEADER,
    Case,
    Compared,
    Way,
    compare,
    slower_control,
)
from rrfp.lab.sweep.pool import run_all, usable_cores


@dataclass(frozen=True, slots=True)
class Size:
    """How much is run."""

    tps: tuple[int, ...] = (2, 4, 8, 16, 32, 64)
    microbatches: int = 64
    control_tp: int = 8
    control_ms: tuple[float, ...] = (0.0, 0.06, 0.25, 1.0, 4.0)


QUICK = Size(tps=(2, 4), microbatches=6, control_tp=2, control_ms=(0.0, 1.0))


@dataclass(frozen=True, slots=True)
class Mean:
    """One figure over the seeds."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Mean:
        """Summarise ``values``."""
        taken = list(values)
        return cls(fmean(taken), pstdev(taken))

    def __str__(self) -> str:
        return f"{self.mean:.4f} +-{self.deviation:.3f}"


@dataclass(frozen=True, slots=True)
class Row:
    """One hint and number of ranks; makespans over the leader's or, where said, over a free leader's."""

    hint: str
    tp: int
    free_leader: Mean
    leader_ahead: Mean
    agreement: Mean
    free_agreement_over_free_leader: Mean
    strict: Mean
    ways: dict[str, Way]
    longest_run_s: float

    @classmethod
    def of(cls, compared: Sequence[Compared]) -> Row:
        """Summarise the draws of one case."""

        def over_leader(makespan: Callable[[Compared], float]) -> Mean:
            return Mean.of(makespan(one) / one.ways[LEADER].makespan for one in compared)

        return cls(
            hint=compared[0].case.hint,
            tp=compared[0].case.tp,
            free_leader=over_leader(lambda one: one.free),
            leader_ahead=over_leader(lambda one: one.ways[AHEAD].makespan),
            agreement=over_leader(lambda one: one.ways[AGREEMENT].makespan),
            free_agreement_over_free_leader=Mean.of(one.ways[FREE_AGREEMENT].makespan / one.free for one in compared),
            strict=over_leader(lambda one: one.strict),
            ways={name: mean_way([one.ways[name] for one in compared]) for name in compared[0].ways},
            longest_run_s=max(way.run_s for one in compared for way in one.ways.values()),
        )


@dataclass(frozen=True, slots=True)
class ControlRow:
    """The makespan of each way over a free leader's, where a message takes so long."""

    control_ms: float
    over_free_leader: dict[str, Mean]


def mean_way(ways: Sequence[Way]) -> Way:
    """Each figure's mean."""
    return Way(*(fmean(getattr(way, field.name) for way in ways) for field in fields(Way)))


def measure(size: Size, seeds: int) -> tuple[list[Row], list[ControlRow]]:
    """Run everything, a process a core."""
    cases = [Case(hint, tp, seed, size.microbatches) for hint in HINTS for tp in size.tps for seed in range(seeds)]
    slow = [Case("bf", size.control_tp, seed, size.microbatches) for seed in range(seeds)]
    compared = list(run_all(compare, cases, jobs=usable_cores()))
    slower = run_all(slower_control, [(case, ms / 1e3) for ms in size.control_ms for case in slow], jobs=usable_cores())
    by_control = {ms: list(islice(slower, seeds)) for ms in size.control_ms}
    free = [one[LEADER] for one in by_control[0.0]]
    control_rows = [
        ControlRow(
            ms,
            {
                way: Mean.of(one[way] / base for one, base in zip(makespans, free, strict=True))
                for way in (LEADER, AHEAD, AGREEMENT)
            },
        )
        for ms, makespans in by_control.items()
    ]
    return [Row.of(compared[at : at + seeds]) for at in range(0, len(cases), seeds)], control_rows


def main() -> None:
    """Run and print."""
    parser = parser_of("Tensor parallelism simulated.")
    parser.add_argument("--seeds", type=int, default=5, help="draws of the workload, at least 1")
    arguments = parsed(parser, "seeds")
    load = OtherLoad()
    rows, control = measure(QUICK, min(2, arguments.seeds)) if arguments.quick else measure(Size(), arguments.seeds)
    if arguments.json:
        plain = {"rows": [asdict(row) for row in rows], "control": [asdict(row) for row in control]}
        print(json.dumps({**plain, "other_load": load.share()}))
        return
    print_tables(rows, control)
    print(f"the longest simulation took {max(row.longest_run_s for row in rows):.1f} s; {load.sentence()}")


def print_tables(rows: Sequence[Row], control: Sequence[ControlRow]) -> None:
    """For people."""
    console = Console(width=110)
    for hint in HINTS:
        mine = [row for row in rows if row.hint == hint]
        console.print(makespans(hint, mine), efforts(hint, mine))
    table = table_of("slower control: bf's makespan over a free leader's", "ms a message", LEADER, AHEAD, AGREEMENT)
    for one in control:
        table.add_row(f"{one.control_ms:g}", *(str(one.over_free_leader[way]) for way in (LEADER, AHEAD, AGREEMENT)))
    console.print(table)


def makespans(hint: str, rows: Sequence[Row]) -> Table:
    """How long steps take."""
    free = "agreement / leader, free"
    table = table_of(f"{hint}: makespan over the leader's", "TP", "leader, free", AHEAD, AGREEMENT, "1f1b", free)
    for row in rows:
        ratios = (row.free_leader, row.leader_ahead, row.agreement, row.strict, row.free_agreement_over_free_leader)
        table.add_row(str(row.tp), *map(str, ratios))
    return table


def efforts(hint: str, rows: Sequence[Row]) -> Table:
    """What coordination takes."""
    shares = ("coord. leader", "depth 2", "agreement")
    table = table_of(f"{hint}: coordination", "TP", *shares, "failed", "messages, leader", "messages, agreement")
    for row in rows:
        led, ahead, agreed = (row.ways[way] for way in (LEADER, AHEAD, AGREEMENT))
        lost = (f"{way.share:.2%}" for way in (led, ahead, agreed))
        table.add_row(str(row.tp), *lost, f"{agreed.failed:.2f}", f"{led.messages:,.1f}", f"{agreed.messages:,.1f}")
    return table


if __name__ == "__main__":
    main()
