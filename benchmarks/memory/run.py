"""What each hint holds at each memory limit, beside schedules run to the letter. Takes about two and a half minutes.

    python benchmarks/memory/run.py [--rounds N] [--ragged] [--quick] [--json]

Four processes under torchrun train the same modules over shm, one method after the other. A stage has two parts; for
each microbatch a part keeps an activation of 8 MiB and its input of 2 MiB, and 2 MiB travel between stages. Tasks are
stretched to a cost table (mllm, jitter J2), as an accelerator would leave the CPU idle, so times can be compared.

limit: 1, 1f1b (N - i on stage i), n, 2n microbatches, or bytes: as many on every stage as strict 1F1B holds on its
fullest. A schedule run to the letter has none.
--ragged: microbatches have rows in proportion to their sizes in mllm, the same in the mean, and hints are told the
sizes; with one more limit, "n's bytes": on each stage what the same hint held there within n microbatches.
/ 1f1b: time of a step over that of strict 1F1B on the same table; the median where there are several rounds.
held: the most microbatches of each stage (zb-v: halves of them, as a stage has two chunks).
held MiB: the most bytes of each stage, as the runtime counts them; docs/memory.md says what counts.
received: the most bytes of any stage that had arrived and whose task had not started; no limit counts them.
grown: by how much the process of a stage was larger during a step than before it, at most, for the stage that grew
most; measured by the kernel (Linux). It has everything: what is counted, received inputs, copies on their way, and
temporary memory of operators; but not the inputs of the first stage, which were there before.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.memory.settings import BASELINE, Settings
from benchmarks.shared.figures import table_of
from benchmarks.shared.load import OtherLoad
from benchmarks.shared.options import parsed, parser_of
from benchmarks.shared.workers import run_workers

Line = Mapping[str, Any]

MIB = 1 << 20

#: With a fixed threshold large tensors come from the kernel one by one, and go back to it.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "2"}


@dataclass(frozen=True, slots=True)
class Figures:
    """One method; lists by stage. See the head of this file."""

    name: str
    limit: str
    seconds: float
    per_baseline: float
    held: tuple[int, ...]
    held_bytes: tuple[int, ...]
    received_bytes: tuple[int, ...]
    grown_bytes: tuple[int, ...]
    overrun: float


def figures_of(settings: Settings, lines: Sequence[Line]) -> list[Figures]:
    """Every method's figures, the largest of all rounds."""
    by_method: dict[tuple[str, str], list[Line]] = defaultdict(list)
    for line in lines:
        by_method[line["name"], line["limit"]].append(line)
    seconds = {method: _seconds(mine) for method, mine in by_method.items()}
    base = seconds[BASELINE, ""]

    def largest(mine: Sequence[Line], what: str) -> tuple[int, ...]:
        return tuple(max(line[what] for line in mine if line["stage"] == s) for s in range(settings.stages))

    return [
        Figures(
            *method,
            seconds=median(seconds[method]),
            per_baseline=median(own / one for own, one in zip(seconds[method], base, strict=True)),
            held=largest(mine, "held"),
            held_bytes=largest(mine, "held_bytes"),
            received_bytes=largest(mine, "received_bytes"),
            grown_bytes=largest(mine, "grown_bytes"),
            overrun=max(line["overrun"] for line in mine),
        )
        for method, mine in by_method.items()
    ]


def _seconds(lines: Sequence[Line]) -> list[float]:
    """Of each round."""
    return [line["seconds"] for line in sorted(lines, key=lambda line: int(line["round"])) if line["stage"] == 0]


def print_table(settings: Settings, figures: Sequence[Figures]) -> None:
    """For people."""
    shape = f"{settings.stages} stages, {settings.microbatches} microbatches, {settings.activation_bytes / MIB:g} MiB"
    title = f"{shape} an activation, {settings.rounds} step(s) a method; MiB"
    table = table_of(title, "method", "limit", "/ 1f1b", "held", "held MiB", "received", "grown")
    for one in figures:
        held = " ".join(map(str, one.held))
        held_bytes = " ".join(_mebibytes(num_bytes) for num_bytes in one.held_bytes)
        worst = (_mebibytes(max(one.received_bytes)), _mebibytes(max(one.grown_bytes)))
        table.add_row(one.name, one.limit or "strict", f"{one.per_baseline:.2f}", held, held_bytes, *worst)
    Console(width=max(Console().width, 100)).print(table)
    print(f"real compute overran the cost table by {max(one.overrun for one in figures):.1%} at most")


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.0f}"


def main() -> None:
    """Measure and print."""
    parser = parser_of("Peak memory of every hint at every limit.", quick="a smoke run: its times mean nothing")
    parser.add_argument("--rounds", type=int, default=Settings().rounds, help="measured steps a method, at least 1")
    parser.add_argument("--ragged", action="store_true", help="microbatches of different sizes")
    arguments = parsed(parser, "rounds")
    settings = Settings(rounds=arguments.rounds, ragged=arguments.ragged)
    if arguments.quick:
        settings = Settings(stages=2, microbatches=4, rows=4096, rounds=1, hints=("bf", "bfw"), ragged=arguments.ragged)
    lines, load = [], OtherLoad()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        steps = progress.add_task("steps", total=len(settings.methods) * settings.rounds * settings.stages)
        for line in run_workers(
            Path(__file__).with_name("worker.py"), settings.stages, settings.to_json(), variables=MALLOC
        ):
            lines.append(line)
            progress.advance(steps)
    figures = figures_of(settings, lines)
    if arguments.json:
        document = {"settings": asdict(settings), "figures": [asdict(one) for one in figures]}
        print(json.dumps({**document, "other_load": load.share()}))
    else:
        print_table(settings, figures)
        print(load.sentence())


if __name__ == "__main__":
    main()
