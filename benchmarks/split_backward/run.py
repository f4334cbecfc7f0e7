"""A split backward beside the ordinary one and torch.distributed.pipelining's: time and bytes. About three minutes.

    python benchmarks/split_backward/run.py [--rounds N] [--quick] [--json]

A stack of GPT blocks on one thread, sequence 256, a microbatch of one sequence. All ways alternate in every round;
times are CPU times of the thread, figures are medians of ratios to the ordinary backward in the same round.

F+B+W: the whole of a microbatch over F + ordinary backward. The aim is at most 1.03 from hidden size 512 on. malloc
keeps freed memory, as an accelerator's allocator does. "by default" it gives much of it back to the kernel, and
what waits for W then costs page faults too.
B+W, B: over the ordinary backward alone.
kept: bytes that stay allocated between B and W for a microbatch, measured by the process's memory over several
microbatches, over what has to stay: the inputs of the linear layers and the gradients of their outputs. The aim is at
most 1.10 from hidden size 512 on.
rrfp defers the weight gradients of layers that are worth it; "all" and "none" are what it could do instead.

The second table is why: what deferring one linear layer costs, beside its weight gradient itself; 256 rows.
`--quick` only shows that everything runs: its figures mean nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.shared.figures import Aim, aims_table, table_of
from benchmarks.shared.load import OtherLoad
from benchmarks.shared.options import parsed, parser_of
from benchmarks.shared.workers import environment_with
from benchmarks.split_backward.ways import BLOCKS, ORDINARY, SEQUENCE, WAYS, ideal_bytes
from rrfp.compute.split.backward import MIN_FLOPS

HIDDEN: Sequence[int] = (64, 128, 256, 512, 768)
LAYER_HIDDEN: Sequence[int] = (32, 64, 128, 192, 256, 384, 512, 768)
#: From this hidden size on the aims hold.
LARGE = 512
MOST_TIME, MOST_KEPT = 1.03, 1.10

RRFP = "rrfp"
#: Those measured under malloc's default, too.
WITH_FAULTS = (ORDINARY, RRFP, "torch pipelining")

#: Freed memory stays in the process; large tensors come from the kernel one by one, and go back.
KEEPING = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
RETURNING = {"MALLOC_MMAP_THRESHOLD_": "65536"}

#: By way, the seconds of F, B and W in each round.
Times = Mapping[str, Sequence[Sequence[float]]]


@dataclass(frozen=True, slots=True)
class Figures:
    """One way at one hidden size; see the head of this file. None: not measured."""

    total: float
    total_by_default: float | None
    backward: float
    input_part: float
    kept_bytes: float | None
    kept: float | None


@dataclass(frozen=True, slots=True)
class Layer:
    """One linear layer."""

    hidden: int
    flops: float
    cost_s: float
    product_s: float


def run(what: str, hidden: int, rounds: int, ways: Sequence[str], malloc: Mapping[str, str]) -> Any:
    """Measure in a process of its own.

    Raises:
        subprocess.CalledProcessError: if it failed.
    """
    command = [sys.executable, str(Path(__file__).with_name("process.py")), what, str(hidden), str(rounds)]
    done = subprocess.run(
        [*command, *ways], stdout=subprocess.PIPE, text=True, env=environment_with(malloc), check=True
    )
    return json.loads(done.stdout)


def measure(hidden: int, rounds: int) -> dict[str, Figures]:
    """All ways at one hidden size."""
    times: Times = run("times", hidden, rounds, list(WAYS), KEEPING)
    by_default: Times = run("times", hidden, rounds, WITH_FAULTS, {}) if hidden >= LARGE else {}
    kept: dict[str, float] = run("kept", hidden, 1, [way for way in WAYS if way != ORDINARY], RETURNING)
    return {
        way: Figures(
            _ratio(times, way, (0, 1, 2), (0, 1, 2)),
            _ratio(by_default, way, (0, 1, 2), (0, 1, 2)) if way in by_default else None,
            _ratio(times, way, (1, 2), (1,)),
            _ratio(times, way, (1,), (1,)),
            kept.get(way),
            kept[way] / ideal_bytes(hidden) if way in kept else None,
        )
        for way in WAYS
    }


def _ratio(times: Times, way: str, own: Sequence[int], base: Sequence[int]) -> float:
    """The median over the rounds of some parts of ``way`` over some of the ordinary backward."""
    pairs = zip(times[way], times[ORDINARY], strict=True)
    return median(sum(mine[part] for part in own) / sum(other[part] for part in base) for mine, other in pairs)


def measure_layer(hidden: int, rounds: int) -> Layer:
    """One linear layer, deferred whatever its size."""
    document = run("layer", hidden, rounds, ["rrfp, all deferred"], KEEPING)
    return Layer(hidden, 2.0 * SEQUENCE * hidden**2, document["cost"], document["product"])


def aims_of(figures: Mapping[int, Mapping[str, Figures]]) -> list[Aim]:
    """Ours at the large sizes, in percent."""
    aims = []
    for hidden, ways in figures.items():
        if hidden >= LARGE:
            own = ways[RRFP]
            assert own.kept is not None
            aims.append(Aim(f"F+B+W, hidden {hidden}", 100 * own.total, 100 * MOST_TIME, unit="%"))
            aims.append(Aim(f"kept, hidden {hidden}", 100 * own.kept, 100 * MOST_KEPT, unit="%"))
    return aims


def print_tables(figures: Mapping[int, Mapping[str, Figures]], layers: Sequence[Layer], aims: Sequence[Aim]) -> None:
    """For people."""
    console = Console(width=max(Console().width, 100))
    title = f"{BLOCKS} GPT blocks, sequence {SEQUENCE}, one thread"
    table = table_of(title, "hidden", "way", "F+B+W", "by default", "B+W", "B", "kept MiB", "kept / ideal")
    for hidden, ways in figures.items():
        for way, one in ways.items():
            ratios = map(_figure, (one.total, one.total_by_default, one.backward, one.input_part))
            kept = "-" if one.kept_bytes is None else f"{one.kept_bytes / 2**20:.1f}"
            table.add_row(str(hidden), way, *ratios, kept, _figure(one.kept, 2))
    console.print(table)
    title = f"one linear layer; deferred from {MIN_FLOPS / 1e6:g} million operations on"
    table = table_of(title, "hidden", "million operations", "weight gradient us", "deferring it us", "of it")
    for layer in layers:
        seconds = (f"{layer.product_s * 1e6:.0f}", f"{layer.cost_s * 1e6:.0f}", f"{layer.cost_s / layer.product_s:.0%}")
        table.add_row(str(layer.hidden), f"{layer.flops / 1e6:.1f}", *seconds)
    console.print(table)
    console.print(aims_table(aims))


def _figure(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def main() -> None:
    """Measure and print."""
    parser = parser_of("Split backward, ordinary backward and torch's split.")
    parser.add_argument("--rounds", type=int, default=15, help="measured rounds, at least 1")
    arguments = parsed(parser, "rounds")
    load = OtherLoad()
    sizes, layer_sizes, rounds = HIDDEN, LAYER_HIDDEN, arguments.rounds
    if arguments.quick:
        sizes, layer_sizes, rounds = HIDDEN[:1], LAYER_HIDDEN[:1], 1
    figures = {hidden: measure(hidden, rounds) for hidden in sizes}
    layers = [measure_layer(hidden, rounds) for hidden in layer_sizes]
    aims = aims_of(figures)
    if arguments.json:
        plain = {hidden: {way: asdict(one) for way, one in ways.items()} for hidden, ways in figures.items()}
        document = {"figures": plain, "layers": [asdict(layer) for layer in layers]}
        print(json.dumps({**document, "aims": [aim.to_json() for aim in aims], "other_load": load.share()}))
    else:
        print_tables(figures, layers, aims)
        print(load.sentence())


if __name__ == "__main__":
    main()
