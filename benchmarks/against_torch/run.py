"""RRFP beside torch.distributed.pipelining on the same emulated stages. Takes about two minutes.

    python benchmarks/against_torch/run.py [--profile mllm|llm] [--rounds N] [--quick] [--json]

Four processes under torchrun run torch's ScheduleGPipe and Schedule1F1B (gloo) and RRFP, alternating by step. RRFP's
transport is its default, shared memory in one host, but for the methods whose names end in zmq. All run the very same
modules, which sleep a cost table's time and put out 2 MiB. Every round has a table of its own; J0 is without jitter, J3
with the most. Figures are medians over the rounds.

iteration: wall time of a step, from one start for all ranks until the last has returned.
/ torch 1F1B: the same, relative to torch's 1F1B in the same round.
/ bound: relative to the lower bound that no order, memory or transport can beat.
held: the most microbatches that each stage held, counted by the stages themselves.
transfer: of a 2 MiB message, from the call of send to the arrival being filed; median over a step's messages.
overhead: the step's time over what the executed order takes in the engine, which is given the table's durations and the
measured transfer time for every message, minus 1. "in tasks" and "between" are its two factors: the lane's tasks took
longer than the table says (autograd, checks, late wake-ups), and everything else. The aim for RRFP is at most 3%.
torch's rows take RRFP's transfer time of the same round, since torch does not tell its own.

torch posts a receive when its schedule gets there, and a send holds up its order; RRFP always receives. `--quick` only
shows that everything runs: its figures mean nothing.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.progress import Progress

from benchmarks.against_torch.overhead import Line, Overhead, transfer_of
from benchmarks.against_torch.settings import BASELINE, JITTERS, METHODS, RRFP_METHODS, Settings
from benchmarks.shared.figures import Aim, table_of
from benchmarks.shared.load import OtherLoad
from benchmarks.shared.options import parsed, parser_of
from benchmarks.shared.workers import run_workers
from rrfp.costs import PROFILES
from rrfp.sim.bound import lower_bound

#: The most that the runtime may add to what its order costs.
MOST_OVERHEAD = 0.03

_NOTHING = "-"


@dataclass(frozen=True, slots=True)
class Figures:
    """One method with one jitter over the measured rounds; see the head of this file."""

    iteration_s: float
    per_baseline: float
    per_bound: float
    held: tuple[int, ...]
    transfer_s: float | None
    overhead: Overhead


def figures_of(settings: Settings, lines: Sequence[Line]) -> dict[str, dict[str, Figures]]:
    """Figures by jitter and method."""
    measured = [line for line in lines if line["round"] > 0]
    by_method: dict[tuple[str, str], list[Line]] = defaultdict(list)
    transfers: dict[tuple[str, int], list[float]] = defaultdict(list)
    for line in measured:
        by_method[line["jitter"], line["method"]].append(line)
        if (transfer := transfer_of(line)) is not None:
            transfers[line["jitter"], line["round"]].append(transfer)
    typical = {key: median(each) for key, each in transfers.items()}
    return {
        jitter: {
            method: _figures(settings, by_method[jitter, method], by_method[jitter, BASELINE], typical)
            for method in METHODS
        }
        for jitter in JITTERS
    }


def _figures(
    settings: Settings, lines: Sequence[Line], baseline: Sequence[Line], typical: Mapping[tuple[str, int], float]
) -> Figures:
    tables = [settings.costs(line["round"], line["jitter"]) for line in lines]
    seconds = [line["seconds"] for line in lines]
    own = [transfer for line in lines if (transfer := transfer_of(line)) is not None]
    used = own or [typical[line["jitter"], line["round"]] for line in lines]
    overheads = [Overhead.of(*each) for each in zip(lines, tables, used, strict=True)]
    return Figures(
        iteration_s=median(seconds),
        per_baseline=median(took / base["seconds"] for took, base in zip(seconds, baseline, strict=True)),
        per_bound=median(took / lower_bound(costs, None) for took, costs in zip(seconds, tables, strict=True)),
        held=tuple(max(held) for held in zip(*(line["held"] for line in lines), strict=True)),
        transfer_s=median(own) if own else None,
        overhead=_typical(overheads),
    )


def _typical(overheads: Sequence[Overhead]) -> Overhead:
    """The median of each figure."""

    def middle(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return median(known) if known else None

    return Overhead(
        median(each.total for each in overheads),
        middle([each.in_tasks for each in overheads]),
        middle([each.between for each in overheads]),
    )


def aims_of(figures: Mapping[str, Mapping[str, Figures]]) -> list[Aim]:
    """The overhead of each method of RRFP."""
    return [
        Aim(_aim_name(jitter, method), methods[method].overhead.total * 100, MOST_OVERHEAD * 100, unit="%")
        for jitter, methods in figures.items()
        for method in RRFP_METHODS
    ]


def print_tables(settings: Settings, figures: Mapping[str, Mapping[str, Figures]], aims: Sequence[Aim]) -> None:
    """For people."""
    console = Console()
    sizes = f"{settings.stages} stages, {settings.microbatches} microbatches, {settings.rounds} rounds"
    for jitter, methods in figures.items():
        title = f"{settings.profile}, {jitter}, {sizes}"
        table = table_of(title, "method", "iteration", "/ torch 1F1B", "/ bound", "held")
        for method, one in methods.items():
            ratios = (f"{one.per_baseline:.3f}", f"{one.per_bound:.3f}")
            table.add_row(method, f"{one.iteration_s * 1e3:.0f} ms", *ratios, " ".join(map(str, one.held)))
        console.print(table)
    verdicts = {aim.name: "yes" if aim.met else "NO" for aim in aims}
    title = f"beyond the engine (aim for RRFP: overhead at most {MOST_OVERHEAD:.0%})"
    table = table_of(title, "method", "transfer", "overhead", "in tasks", "between", "met")
    for jitter, methods in figures.items():
        for method, one in methods.items():
            transfer = _NOTHING if one.transfer_s is None else f"{one.transfer_s * 1e3:.2f} ms"
            shares = map(_share, (one.overhead.total, one.overhead.in_tasks, one.overhead.between))
            table.add_row(f"{jitter} {method}", transfer, *shares, verdicts.get(_aim_name(jitter, method), _NOTHING))
    console.print(table)


def _share(part: float | None) -> str:
    return _NOTHING if part is None else f"{part:.1%}"


def _aim_name(jitter: str, method: str) -> str:
    return f"overhead, {jitter}, {method}"


def main() -> None:
    """Measure and print."""
    parser = parser_of("RRFP beside torch.distributed.pipelining.")
    parser.add_argument("--profile", choices=list(PROFILES), default=Settings().profile, help="the workload")
    parser.add_argument("--rounds", type=int, default=Settings().rounds, help="measured rounds, at least 1")
    arguments = parsed(parser, "rounds")
    settings = Settings(profile=arguments.profile, rounds=arguments.rounds)
    if arguments.quick:
        settings = replace(settings, microbatches=settings.stages, rounds=1)

    lines, load = [], OtherLoad()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        steps = progress.add_task("steps", total=len(METHODS) * (1 + settings.rounds * len(JITTERS)))
        for line in run_workers(Path(__file__).with_name("worker.py"), settings.stages, settings.to_json()):
            lines.append(line)
            progress.advance(steps)
    figures = figures_of(settings, lines)
    aims = aims_of(figures)
    if arguments.json:
        plain = {jitter: {name: asdict(one) for name, one in methods.items()} for jitter, methods in figures.items()}
        document = {"settings": asdict(settings), "figures": plain, "aims": [aim.to_json() for aim in aims]}
        print(json.dumps({**document, "other_load": load.share()}))
    else:
        print_tables(settings, figures, aims)
        print(load.sentence())


if __name__ == "__main__":
    main()
