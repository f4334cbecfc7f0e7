"""Replicas of which one has a slow rank: each runs its own microbatches, or they share them.

    python benchmarks/replicas/run.py [--layout 4x2] [--rounds N] [--pace 1] [--slow-links] [--equal] [--quick]
                                      [--json [FILE]]
    python benchmarks/replicas/run.py --simulate [--quick] [--json [FILE]]
    python benchmarks/replicas/run.py --gains [--quick] [--json [FILE]]

F 10 and B 20 ms, a whole backward, 4 PP microbatches a replica, the default hint, limit 2n. The rank of stage PP / 2 of
replica 0 is 1 (equal), 1.5, 2 and 4 times as slow; with --simulate also that of stage 0 of replica 1 ("slow": 2). All
times are over that of equal replicas that run their own. Inputs of a microbatch, an activation and a gradient have
64 KiB each; "bytes" are those that go to another replica.

**Processes**, eight of them under torchrun, as PP 4 x DP 2 and PP 2 x DP 4, or with ``--layout 4x2-2-looped`` and
``4x2-2-v`` as PP 4 x DP 2 with two chunks a stage, which take half as long each: without ``share_replicas``, with
``"dealt"`` and with ``True`` ("claimed"), in turns by step; tasks sleep. Medians; "simulated" is the step of the engine
or, claimed, of the cores of all ranks. Where a rank has become slower five steps are not measured. No gradients are
summed. All ranks begin a step at one instant. With --slow-links every message takes a millisecond (times the pace), one
of a claim too; without dealing. With --equal no rank is slow.

**--simulate**: all these and PP 8 x DP 8: microbatches of one size, without jitter, with messages of 1 ms (each of a
claim, and that before a claimed step, too) and with jitter J2 (docs/simulator.md); "uneven": of log-normal sizes (sigma
0.5), which hints, dealing and claims know; and "late": the rank becomes slow in mid-step, which no step before has
shown. "dropped": the replica with the slow rank is left out, and the others run its microbatches. "bound": no way to
share microbatches among replicas, stage by stage included, takes less. "moved": microbatches that change replicas in a
step that is dealt.

**--gains**: no rank is slow, PP 4, 16 microbatches a replica that differ as a profile says, limits n and 2n: how much
claims gain since the step need not end with the replica that has most to do.

ReCycle (SOSP '24, arXiv 2405.14009) moves microbatches between the replicas' copies of a stage where a rank is *lost*,
by a plan. Its authors state up to 1.46 times Oobleck's and 1.64 times Bamboo's throughput: theirs, on other systems,
and not to be compared with these ratios.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.replicas.settings import CHUNKED, LATENCY_S, METHODS, REAL, Layout, Settings
from benchmarks.replicas.simulated import Case, gains, rows, seconds_by
from benchmarks.shared.load import OtherLoad
from benchmarks.shared.options import parsed, parser_of, report, text_of
from benchmarks.shared.workers import run_workers

#: Seconds without a report after which workers count as hung.
_PATIENCE_S = 180.0


@dataclass(frozen=True, slots=True)
class Measured:
    """One method with one factor: medians.

    Attributes:
        layout: of the ranks.
        latency: seconds that a message takes; 0: over the links that there are.
        method: ``plain``, ``dealt`` or ``claimed``.
        factor: how much slower the slow rank is.
        seconds: of a step.
        over_equal: the same over ``plain`` with equal replicas.
        simulated: the same by simulation.
        bytes: inputs, activations and gradients that went to another replica in a step.
    """

    layout: str
    latency: float
    method: str
    factor: float
    seconds: float
    over_equal: float
    simulated: float
    bytes: float


def measure(settings: Settings) -> Iterator[Measured]:
    """Run the processes of one layout."""
    worker, ranks = Path(__file__).with_name("worker.py"), settings.layout.stages * settings.layout.replicas
    yield from measured(settings, run_workers(worker, ranks, settings.to_json(), patience=_PATIENCE_S))


def measured(settings: Settings, reports: Iterable[Any]) -> Iterator[Measured]:
    """A row for each method and factor that workers have reported."""
    layout, kind = settings.layout, "1 ms" if settings.latency else "J0"
    lines: dict[tuple[str, float], list[Any]] = defaultdict(list)
    for line in reports:
        lines[line["method"], line["factor"]].append(line)
    equal = median(line["seconds"] for line in lines["plain", 1.0])
    simulated_equal = seconds_by("plain", Case(layout, kind, 1.0))
    for (method, factor), own in sorted(lines.items(), key=lambda item: (item[0][1], METHODS.index(item[0][0]))):
        seconds = median(line["seconds"] for line in own)
        simulated = seconds_by(method, Case(layout, kind, factor)) / simulated_equal
        crossed = median(line["crossed"] for line in own)
        yield Measured(str(layout), settings.latency, method, factor, seconds, seconds / equal, simulated, crossed)


def _name_of(layout: Layout) -> str:
    chunks = "" if layout.chunks == 1 else f"-{layout.chunks}-{layout.placement}"
    return f"{layout.stages}x{layout.replicas}{chunks}"


def main() -> None:
    """Measure, or simulate, and print."""
    parser = parser_of(__doc__, json_file=True)
    parser.add_argument("--simulate", action="store_true", help="by the engine and the cores")
    parser.add_argument("--gains", action="store_true", help="likewise, where no rank is slow")
    names = {_name_of(each): each for each in (*REAL, *CHUNKED)}
    parser.add_argument("--layout", choices=names, help="stages x replicas of processes, and chunks; by default two")
    parser.add_argument("--slow-links", action="store_true", help="every message takes a millisecond, times the pace")
    parser.add_argument("--equal", action="store_true", help="no rank is slow")
    parser.add_argument("--pace", type=float, default=1.0, help="how much longer tasks are")
    parser.add_argument("--rounds", type=int, default=8, help="measured steps of each method and factor, at least 1")
    arguments = parsed(parser, "rounds")
    console, load = Console(width=140), OtherLoad()
    found: list[Any]
    layouts = [names[arguments.layout]] if arguments.layout else REAL
    how: dict[str, Any] = {"pace": arguments.pace}
    if arguments.slow_links:
        how |= {"latency": LATENCY_S, "methods": ("plain", "claimed")}
    if arguments.equal:
        how["factors"] = (1.0,)
    if arguments.gains:
        found = list(gains((2,), 1) if arguments.quick else gains())
    elif arguments.simulate:
        found = list(rows((Layout(2, 2),), 2) if arguments.quick else rows())
    elif arguments.quick:
        found = list(measure(Settings(Layout(2, 2), **{"factors": (1.0, 4.0), **how}, rounds=1)))
    else:
        found = [row for each in layouts for row in measure(Settings(each, rounds=arguments.rounds, **how))]

    def tables() -> None:
        table = Table(*asdict(found[0]))
        for row in found:
            cells = (f"{value:.3g}" if isinstance(value, float) else str(value) for value in asdict(row).values())
            table.add_row(*cells)
        console.print(table)
        print(load.sentence())

    document: dict[str, Any] = {"rows": list(map(asdict, found))}
    if not (arguments.simulate or arguments.gains):
        document["other_load"] = load.share()
    report(arguments.json, document, tables, text_of)


if __name__ == "__main__":
    main()
