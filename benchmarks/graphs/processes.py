"""The multimodal model as a chain, a branch and co-located, in real processes. Takes about 75 minutes.

    python benchmarks/graphs/processes.py [--stages 4 8] [--rounds 20] [--pace X] [--aimed] [--quick] [--json [FILE]]

One process a stage, under torchrun, runs emulated stages over the default transport: each task sleeps as long as the
cost table says (profile multimodal, no jitter, no emulated latency), and every output has 2 MiB. All forms have the
default hint with ``sizes``, an unsplit backward and the same limit on bytes on every rank: N is what a microbatch of
average size holds on all ranks together, 2N twice that. Forms and limits alternate by step; each round draws other
microbatches, the same for all forms. M is 32.

/ chain: a form's time over the chain's under the same limit in the same round, mean ± its 95% interval over the rounds.
simulated: the same ratio in the engine, on the same tables without latency, each step a first one. ms: of a step, and
in brackets simulated. CPU s: processor time that a step takes of all ranks together, with the 50 ms before and behind
it. held: the most bytes of any rank, over the limit.

Only rounds in which both steps were undisturbed count: other processes took at most 0.3 cores; †: there was none, and
all count. Below the tables are the
aims for 0.6 of all microbatches with an image and 0.4 with a sound, and whether they are met.

`--pace 3` makes all tasks three times as long; messages and decisions take the time that they take. `--aimed` measures
those shares alone, in a third of the time. `--quick` only shows that everything runs: its figures
mean nothing.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.graphs.figures import AIMED_SHARES
from benchmarks.graphs.forms import SCALE, Settings, Turn
from benchmarks.graphs.runs import CHAIN, FORMS, LIMITS
from benchmarks.shared.figures import table_of
from benchmarks.shared.load import OtherLoad
from benchmarks.shared.options import parser_of, report
from benchmarks.shared.step_report import MARK
from benchmarks.shared.steps import DISTURBED_CORES, others_of
from benchmarks.shared.workers import run_workers
from rrfp.engine.engine import run
from rrfp.hints.registry import DEFAULT_HINT, create_hint
from rrfp.memory.admission import Limit

#: The shares of microbatches with an image, and with a sound.
SHARES = ((1.0, 1.0), AIMED_SHARES, (0.3, 0.2))
#: The aims for `AIMED_SHARES`: a form's share of the chain's time.
AIMS = {"branch, skipped": 0.92, "co-located, skipped": 0.80}


@dataclass(frozen=True, slots=True)
class Step:
    """One measured step.

    Attributes:
        turn: whose it is.
        seconds: from the call on all ranks until the last one has returned.
        others: cores that other processes took meanwhile; None where it is not known.
        held: the most bytes of any rank over the limit.
        processor_s: processor time of all ranks.
    """

    turn: Turn
    seconds: float
    others: float | None
    held: float
    processor_s: float

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Step:
        """Read a line of rank 0."""
        turn, ranks = Turn(*line["turn"]), line["ranks"]
        seconds = max(rank["returned"] for rank in ranks) - ranks[0]["started"]
        held = max(ranks[0]["peak_bytes"]) / (SCALE * LIMITS[turn.limit])
        return cls(turn, seconds, others_of(ranks), held, sum(sum(rank["cpu"].values()) for rank in ranks))

    @property
    def is_disturbed(self) -> bool:
        """Whether other processes may have changed its time."""
        return self.others is not None and self.others > DISTURBED_CORES


@dataclass(frozen=True, slots=True)
class Figure:
    """One form under one limit.

    Attributes:
        ratio: its time over the chain's, mean over the rounds that are used.
        interval: half of the 95% interval of the ratio.
        simulated: the mean ratio in the engine.
        milliseconds: of a step, mean.
        simulated_ms: the same in the engine.
        processor_s: processor time of a step, of all ranks, mean.
        held: the most bytes of any rank over the limit.
        used: rounds that count.
        rounds: all.
        is_disturbed: in no round were both steps undisturbed, and all count.
    """

    ratio: float
    interval: float
    simulated: float
    milliseconds: float
    simulated_ms: float
    processor_s: float
    held: float
    used: int
    rounds: int
    is_disturbed: bool


def figure_of(steps: Sequence[Step], chain: Sequence[Step], settings: Settings) -> Figure:
    """The figures of ``steps`` beside those of the chain."""
    by_round = {step.turn.number: step for step in chain}
    pairs = [(step, by_round[step.turn.number]) for step in steps]
    quiet = [pair for pair in pairs if not any(step.is_disturbed for step in pair)]
    used = quiet or pairs
    ratios = [step.seconds / other.seconds for step, other in used]
    simulated = [(simulated_s(settings, step.turn), simulated_s(settings, other.turn)) for step, other in used]
    return Figure(
        mean(ratios),
        1.96 * stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else math.nan,
        mean(own / chains for own, chains in simulated),
        mean(step.seconds for step, _ in used) * 1e3,
        mean(own for own, _ in simulated) * 1e3,
        mean(step.processor_s for step, _ in used),
        max(step.held for step in steps),
        len(used),
        len(pairs),
        not quiet,
    )


def simulated_s(settings: Settings, turn: Turn) -> float:
    """The makespan of the engine on the same table, where messages take no time."""
    table = settings.table(turn)
    hints = [create_hint(DEFAULT_HINT) for _ in range(settings.stages)]
    limits = [Limit(bytes=LIMITS[turn.limit])] * settings.stages
    return run(table, hints, limits, sizes=settings.sizes(turn)).makespan


def measured(every: Sequence[Settings]) -> Iterator[tuple[Settings, list[Step]]]:
    """Run the processes."""
    worker = Path(__file__).with_name("worker.py")
    with Progress(console=Console(stderr=True), transient=True, auto_refresh=False) as progress:
        done = progress.add_task("steps", total=sum(1 for settings in every for _ in settings.turns()))
        for settings in every:
            steps = []
            for line in run_workers(worker, settings.stages, settings.to_json()):
                steps.append(Step.of(line))
                progress.update(done, advance=1, refresh=True)
            yield settings, [step for step in steps if step.turn.number]


#: By limit and form.
Figures = Mapping[tuple[str, str], Figure]


def figures_of(settings: Settings, steps: Sequence[Step]) -> Figures:
    """The figures of one set of processes."""
    by_turn: dict[tuple[str, str], list[Step]] = defaultdict(list)
    for step in steps:
        by_turn[step.turn.limit, step.turn.form].append(step)
    return {key: figure_of(own, by_turn[key[0], CHAIN], settings) for key, own in by_turn.items()}


def table_for(settings: Settings, figures: Figures) -> Table:
    """A row a form and limit."""
    title = f"PP {settings.stages}, images {settings.images:g}, sounds {settings.sounds:g}"
    table = table_of(title, "limit, form", "/ chain", "simulated", "ms", "CPU s", "held", "rounds")
    for limit in LIMITS:
        for form in FORMS:
            one = figures[limit, form]
            table.add_row(
                f"{limit}, {form}" + (f" {MARK}" if one.is_disturbed else ""),
                f"{one.ratio:.3f} ± {one.interval:.3f}",
                f"{one.simulated:.3f}",
                f"{one.milliseconds:,.0f} ({one.simulated_ms:,.0f})",
                f"{one.processor_s:.2f}",
                f"{one.held:.2f}",
                f"{one.used}/{one.rounds}",
            )
    return table


def aims(results: Sequence[tuple[Settings, Figures]]) -> Iterator[str]:
    """Whether each aim is met."""
    for settings, figures in results:
        for (limit, form), one in figures.items():
            if form in AIMS and (settings.images, settings.sounds) == AIMED_SHARES:
                verdict = "met" if one.ratio <= AIMS[form] else "missed"
                yield f"PP {settings.stages}, {limit}, {form}: {one.ratio:.3f}, aim {AIMS[form]:.2f}: {verdict}"


def main() -> None:
    """Measure and print."""
    parser = parser_of("Graphs in real processes.", json_file=True)
    parser.add_argument("--stages", nargs="+", type=int, default=[4, 8], help="numbers of stages, at least 2")
    parser.add_argument("--rounds", type=int, default=20, help="measured rounds, at least 1")
    parser.add_argument("--pace", type=float, default=1.0, help="the factor on all durations, more than 0")
    parser.add_argument("--aimed", action="store_true", help="only the shares of microbatches that the aims are for")
    arguments = parser.parse_args()
    _check(parser, arguments)
    load = OtherLoad()
    every = [
        Settings(stages, *shares, rounds=arguments.rounds, pace=arguments.pace)
        for stages in dict.fromkeys(arguments.stages)
        for shares in ((AIMED_SHARES,) if arguments.aimed else SHARES)
    ]
    if arguments.quick:
        every = [Settings(2, *AIMED_SHARES, microbatches=4, rounds=2)]
    results = [(settings, figures_of(settings, steps)) for settings, steps in measured(every)]
    document = {
        "results": [
            {**asdict(settings), "limit": limit, "form": form, **asdict(one)}
            for settings, figures in results
            for (limit, form), one in figures.items()
        ],
        "aims": list(aims(results)),
        "other_load": load.share(),
    }

    def tables() -> None:
        console = Console(width=max(Console().width, 110))
        for settings, figures in results:
            console.print(table_for(settings, figures))
        print("\n".join(aims(results)))
        print(load.sentence())

    report(arguments.json, document, tables)


def _check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    if min(arguments.stages) < 2:
        parser.error(f"--stages is {min(arguments.stages)}, must be at least 2")
    if arguments.rounds < 1:
        parser.error(f"--rounds is {arguments.rounds}, must be at least 1")
    if not 0 < arguments.pace < math.inf:
        parser.error(f"--pace is {arguments.pace}, must be a number more than 0")


if __name__ == "__main__":
    main()
