"""Replicas of which one has a slow rank: each runs its own microbatches, or they share them.

    python benchmarks/replicas/run.py [--rounds N] [--pace 1] [--quick] [--json [FILE]]
    python benchmarks/replicas/run.py --simulate [--quick] [--json [FILE]]

F 10 and B 20 ms, a whole backward, 4 PP microbatches a replica, the default hint, limit 2n. The rank of stage PP / 2 of
replica 0 is 1 (equal), 1.5, 2 and 4 times as slow; with --simulate also that of stage 0 of replica 1 ("slow": 2). All
times are over that of equal replicas that run their own.

**Processes**, eight of them under torchrun, as PP 4 x DP 2 and PP 2 x DP 4: without ``share_replicas``, with
``"dealt"`` and with ``True`` ("claimed"), in turns by step; tasks sleep. Medians; "simulated" is the engine's step with
the same numbers of microbatches, or that of the cores of all ranks. Where a rank has become slower five steps are not
measured. No gradients are summed.

**--simulate**: these and PP 8 x DP 8: microbatches of one size, without jitter, with messages of 1 ms (each of a claim
too) and with jitter J2 (docs/simulator.md); "uneven": of log-normal sizes (sigma 0.5), which hints, dealing and claims
know; and "late": the rank becomes slow in mid-step, which no step before has shown. "dropped": the replica with the
slow rank is left out, and the others run its microbatches. "bound": no way to share microbatches among replicas, stage
by stage included, takes less. "moved": microbatches that change replicas in a step that is dealt; in processes each has
64 KiB of inputs. "crossed": activations that go to another replica for each microbatch of a claimed step.

ReCycle (SOSP '24, arXiv 2405.14009) moves microbatches between the replicas' copies of a stage where a rank is *lost*,
by a plan. Its authors state up to 1.46 times Oobleck's and 1.64 times Bamboo's throughput: theirs, on other systems,
and not to be compared with these ratios.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.replicas.settings import INPUT_BYTES, METHODS, REAL, Layout, Settings, seconds_of, table_of
from benchmarks.replicas.simulated import Case, claimed_seconds, rows
from benchmarks.shared.load import OtherLoad
from benchmarks.shared.options import parsed, parser_of, report, text_of
from benchmarks.shared.workers import run_workers
from rrfp.runtime.steps.deal import ReplicaPace, dealt

#: Seconds without a report after which workers count as hung.
_PATIENCE_S = 180.0


@dataclass(frozen=True, slots=True)
class Measured:
    """One method with one factor: medians.

    Attributes:
        layout: of the ranks.
        method: ``plain``, ``dealt`` or ``claimed``.
        factor: how much slower the slow rank is.
        seconds: of a step.
        over_equal: the same over ``plain`` with equal replicas.
        simulated: the engine's step, over its step of equal replicas.
        moved_bytes: inputs that changed replicas in a step that was dealt.
    """

    layout: str
    method: str
    factor: float
    seconds: float
    over_equal: float
    simulated: float
    moved_bytes: float


def measure(settings: Settings) -> Iterator[Measured]:
    """Run the processes of one layout."""
    layout = settings.layout
    lines: dict[tuple[str, float], list[Any]] = defaultdict(list)
    worker, ranks = Path(__file__).with_name("worker.py"), layout.stages * layout.replicas
    for line in run_workers(worker, ranks, settings.to_json(), patience=_PATIENCE_S):
        lines[line["method"], line["factor"]].append(line)
    equal = median(line["seconds"] for line in lines["plain", 1.0])
    for (method, factor), own in sorted(lines.items(), key=lambda item: (item[0][1], METHODS.index(item[0][0]))):
        seconds = median(line["seconds"] for line in own)
        simulated = _simulated(layout, method, factor) / _simulated(layout, "plain", 1.0)
        moved = INPUT_BYTES * median(line["moved"] for line in own)
        yield Measured(str(layout), method, factor, seconds, seconds / equal, simulated, moved)


def _simulated(layout: Layout, method: str, factor: float) -> float:
    if method == "claimed":
        return claimed_seconds(Case(layout, "J0", factor))
    slow = [factor] + [1.0] * (layout.replicas - 1)
    given = [[1.0] * layout.microbatches] * layout.replicas
    counts = [*map(len, given)]
    if method == "dealt":
        one = [table_of(layout, [1.0], each) for each in slow]
        counts = [*dealt(given, [ReplicaPace.of((each.forward + each.backward)[:, 0].tolist()) for each in one]).counts]
    return max(seconds_of(table_of(layout, [1.0] * count, each)) for count, each in zip(counts, slow, strict=True))


def main() -> None:
    """Measure, or simulate, and print."""
    parser = parser_of(__doc__, json_file=True)
    parser.add_argument("--simulate", action="store_true", help="by the engine")
    parser.add_argument("--pace", type=float, default=1.0, help="how much longer tasks are")
    parser.add_argument("--rounds", type=int, default=8, help="measured steps of each method and factor, at least 1")
    arguments = parsed(parser, "rounds")
    console, load = Console(width=140), OtherLoad()
    found: list[Any]
    if arguments.simulate:
        found = list(rows((Layout(2, 2),), 2) if arguments.quick else rows())
    elif arguments.quick:
        found = list(measure(Settings(Layout(2, 2), (1.0, 4.0), 1, arguments.pace)))
    else:
        found = [row for each in REAL for row in measure(Settings(each, rounds=arguments.rounds, pace=arguments.pace))]

    def tables() -> None:
        table = Table(*asdict(found[0]))
        for row in found:
            cells = (f"{value:.3g}" if isinstance(value, float) else str(value) for value in asdict(row).values())
            table.add_row(*cells)
        console.print(table)
        print(load.sentence())

    document: dict[str, Any] = {"rows": list(map(asdict, found))}
    if not arguments.simulate:
        document["other_load"] = load.share()
    report(arguments.json, document, tables, text_of)


if __name__ == "__main__":
    main()
