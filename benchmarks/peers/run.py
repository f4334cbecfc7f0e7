"""RRFP beside torch's, Megatron-core's and DeepSpeed's pipeline schedules on the same emulated stages.

    python benchmarks/peers/run.py [--headline | --full | --quick] [--stages 4 8] [--profile llm mllm] [--jitter J0 J3]
        [--methods NAME ...] [--rounds N] [--raw FOLDER] [--resume] [--minutes N] [--json [FILE]]

`make peers ARGS=--headline` does the same, and makes DeepSpeed's environment first (`make peers-site`, a folder of
pinned packages without CUDA); megatron-core is one of the project's own. Without that folder DeepSpeed is left out.

One process a stage, under torchrun, runs all systems, alternating by step: all methods have the same table in a round.
All run the very same modules, which sleep the table's time and put out 2 MiB: torch's schedules and `ScheduleRRFP` in
torch's pipeline stages, Megatron's and its drop-in in Megatron's model chunks, DeepSpeed's in its pipeline module, each
by its own messages over gloo, and RRFP over its default transport. Every round has a table of its own; J0 is without
jitter, J3 with the most. M is 32. DeepSpeed neither reduces gradients nor steps its optimizer, as the others do not.
zero-bubble's repository is left out: it defers weight gradients in a CUDA kernel alone (fused_weight_gradient_mlp_cuda)
and measures memory on CUDA devices, so it does not run on a CPU; torch's ZBV is the schedule of its paper.

--headline, the default, takes 11 minutes on slow cores: PP 8, llm and mllm, J0 and J3, eleven methods, five rounds.
--full: PP 8 and 4, also zipf and moe, and all methods, about two hours; after an interruption it goes on, and called
again it measures once more what lacks undisturbed steps; the others do so with --resume and --minutes. The other
options choose parts; an unknown name prints all methods.

--minutes N: begins no round after N minutes; the rounds so far are kept, and the next call goes on. It reports once no
cell lacks steps. --minutes 0 measures nothing, and reports the cells that lack none: minutes of computation for --full.
``sizes`` are left out on llm, where all microbatches are alike.

RRFP's methods have the default hint and a split backward, with the limit that their names give; "whole" is not split.
"V" and ZBV have two chunks a stage in V placement, "looped" and "interleaved" two one round after the other, on tables
that cut each stage's work in two (benchmarks/shared/tables.py). "bf" and "bfw" are the paper's hints. RRFP in another
system's stages holds what that system's own schedule does, if its name has no limit.

ms: a step, from one start for all ranks until the last has returned; median, as all figures.
/ bound: over the lower bound that no order, memory or transport can beat, for whole tasks on one chunk, so that a split
or a V can be below 1. / own bound: over that of the method's own table. / torch 1F1B and so on: over the peer in the
same round. In brackets, or as "order alone": what the engine says of both, with the methods' hints and limits, or the
order that a peer ran, on the same tables and with messages that take no time. / order alone: measured over that.
[95%]: of the median, by order statistics; of five steps it is their range, which is 94%.
over own: the step's time over that of the order that really ran in the engine, minus 1; "in sleeps" is the part that
the engine explains if tasks are as long as they really were.
held: microbatches on the worst stage, and the sum over all stages; MiB: the same in bytes, as the table has them.
"n by own bytes": each stage may hold the bytes that "n, sizes" holds there in the engine.
start: from the call to the first task of stage 0.
end: from the end of the last task until the last rank has returned.
CPU: of all processes, a task (F, B, W), by thread; without the threads of the other runtimes, and with what goes on for
50 ms after the step.

Only undisturbed steps count. A step is disturbed if other processes took more than 0.3 cores meanwhile; its time does
not matter. The aims compare with the peer whose tasks are as long (over own order: 1F1B for one chunk, ZBV for a V) or
which sends as many messages a task (CPU: 1F1B for a whole backward, else ZBV).

--json FILE: "cells" has one row for each method of a cell: profile, jitter, stages, method, steps (used), discarded,
disturbed (all were), ms, over_bound with low and high, engine_over_bound (the order alone), over_engine (measured over
the order alone), over_executed_order with over_executed_low and _high, held_microbatches and held_bytes (worst stage;
_sum over all), cpu_ms_task, begin_ms, end_ms, and "over": for each peer value, low, high, engine (the orders alone).
"settings" has when it began, the days of its steps, and how many cells were asked for. Raw data, all tasks of all
steps, lie in out/peers/ or in --raw. The committed files are in benchmarks/peers/results.

`--quick` only shows that everything runs: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.integrations.settings import Place
from benchmarks.peers.aims import aims_of
from benchmarks.peers.raw import RawSteps
from benchmarks.peers.report import document_of, print_report, text_of
from benchmarks.peers.settings import FULL_METHODS, HEADLINE_METHODS, METHODS, Settings
from benchmarks.shared.comparison import JITTERS, NUM_BYTES, Cell, Turn
from benchmarks.shared.load import OtherLoad
from benchmarks.shared.options import check_comparison, parser_of, report
from benchmarks.shared.runs import steps_measured
from benchmarks.shared.step_figures import Figures, Results, results_of
from rrfp.costs import JITTER_LEVELS, PROFILES
from rrfp.lab.sweep.pool import run_all, usable_cores

ROOT = Path(__file__).resolve().parents[2]

#: DeepSpeed's packages.
SITE = ROOT / "out" / "peers-site"


class _OverTimeError(Exception):
    """The minutes of a run are over."""


class Scope(NamedTuple):
    """What is measured where the command line says nothing else."""

    stages: tuple[int, ...]
    profiles: tuple[str, ...]
    methods: tuple[str, ...]


SCOPES = {
    "headline": Scope((8,), ("llm", "mllm"), HEADLINE_METHODS),
    "full": Scope((8, 4), ("llm", "mllm", "zipf", "moe"), FULL_METHODS),
    "quick": Scope((2,), ("mllm",), FULL_METHODS),
}

_VERSIONS = ("torch", "megatron-core", "deepspeed", "rrfp")


def main() -> None:
    """Measure and print."""
    arguments = _arguments()
    load = OtherLoad()
    common: dict[str, Any] = {"microbatches": 4 if arguments.quick else 32, "seed": 1, "num_bytes": NUM_BYTES}
    raw = RawSteps(arguments.raw, common, goes_on=arguments.full or arguments.resume or arguments.minutes is not None)
    began = datetime.now(UTC)
    _measure(arguments, raw, list(_settings(arguments, raw, common)))
    cells = list(_cells(arguments))
    asked = len(cells)
    if arguments.minutes is not None:
        cells = [cell for cell in cells if not raw.lacking(cell, arguments.methods, arguments.rounds)]
        print(f"{len(cells)} of {asked} cells have all their steps (--minutes 0 reports them)", file=sys.stderr)
        if arguments.minutes and len(cells) < asked:
            return
    results: dict[Cell, Mapping[str, Figures]] = {}
    for of_cell in run_all(partial(_figures, raw, arguments.methods, common), cells, jobs=usable_cores()):
        results |= of_cell
    aims = aims_of(results)
    settings_data = {**common, "rounds": arguments.rounds, "versions": _versions(), "cores": os.cpu_count()}
    settings_data |= {"asked": asked, "days": raw.days(cells)}
    document: dict[str, Any] = {"settings": settings_data, **document_of(results, aims)}
    if arguments.minutes is None:
        settings_data["began"] = f"{began:%Y-%m-%d %H:%M} UTC"
        document["other_load"] = load.share()

    def tables() -> None:
        print_report(results, aims)
        print(load.sentence())

    report(arguments.json, document, tables, text_of)


def _figures(raw: RawSteps, methods: tuple[str, ...], common: Mapping[str, Any], cell: Cell) -> Results:
    settings = Settings(cell.stages, (cell.profile,), (cell.jitter,), methods, **common)
    return results_of(settings, raw.steps(cell))


def _measure(arguments: argparse.Namespace, raw: RawSteps, every: Sequence[Settings]) -> None:
    """Measure what lacks, or as much as fits into the minutes, in whole rounds."""
    until = math.inf if arguments.minutes is None else time.monotonic() + 60 * arguments.minutes
    last_turns = {turn for settings in every for turn in settings.last_turns()}

    def keep(report: Any) -> None:
        raw.keep(report)
        if time.monotonic() >= until and Turn.of(report["turn"]) in last_turns:
            raise _OverTimeError

    try:
        if arguments.minutes != 0:
            for _ in steps_measured(Path(__file__).with_name("worker.py"), every, keep, _variables()):
                pass
    except _OverTimeError:
        pass


def _arguments() -> argparse.Namespace:
    parser = parser_of("RRFP beside other systems' pipeline schedules.", json_file=True)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--headline", action="store_true", help="PP 8, llm and mllm, eleven methods; the default")
    which.add_argument("--full", action="store_true", help="PP 4 and 8, four profiles, all methods; goes on")
    parser.add_argument("--stages", nargs="+", type=int, help="numbers of stages, at least 2")
    parser.add_argument("--profile", nargs="+", choices=list(PROFILES), help="workloads")
    parser.add_argument("--jitter", nargs="+", choices=list(JITTER_LEVELS), help="levels")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), help="by name")
    parser.add_argument("--rounds", type=int, default=5, help="undisturbed steps of each method, at least 1")
    parser.add_argument("--raw", type=Path, help="the folder of raw data; by default in out/peers")
    parser.add_argument("--resume", action="store_true", help="keep its steps and measure what lacks, as --full does")
    parser.add_argument("--minutes", type=float, help="begin no round after so many, and keep what is there")
    arguments = parser.parse_args()
    if arguments.minutes is not None and not arguments.minutes >= 0:
        parser.error(f"--minutes is {arguments.minutes:g}, must be at least 0")
    name = next((name for name in SCOPES if getattr(arguments, name)), "headline")
    scope = SCOPES[name]
    if arguments.quick:
        arguments.rounds = 1
    arguments.stages = tuple(dict.fromkeys(arguments.stages or scope.stages))
    arguments.profile = tuple(dict.fromkeys(arguments.profile or scope.profiles))
    arguments.jitter = tuple(dict.fromkeys(arguments.jitter or JITTERS))
    asked = arguments.methods
    arguments.methods = tuple(name for name in METHODS if name in (asked or scope.methods))
    arguments.raw = arguments.raw or ROOT / "out" / "peers" / name
    check_comparison(parser, arguments)
    lacking = [name for name in arguments.methods if METHODS[name].place is Place.LAYERS and not _has_deepspeed()]
    if lacking and asked:
        parser.error(f"--methods: {lacking[0]} needs the packages that `make peers-site` installs into {SITE}")
    if lacking:
        print("DeepSpeed is left out: `make peers-site` installs it", file=sys.stderr)
        arguments.methods = tuple(name for name in arguments.methods if name not in lacking)
    return arguments


def _cells(arguments: argparse.Namespace) -> Iterator[Cell]:
    for stages in arguments.stages:
        for profile in arguments.profile:
            yield from (Cell(stages, profile, jitter) for jitter in arguments.jitter)


def _settings(arguments: argparse.Namespace, raw: RawSteps, common: Mapping[str, Any]) -> Iterator[Settings]:
    """One for each set of processes, with the rounds that lack."""
    groups: dict[tuple[int, str], list[Cell]] = {}
    for cell in _cells(arguments):
        groups.setdefault((cell.stages, cell.profile if arguments.full else ""), []).append(cell)
    for (stages, _), cells in groups.items():
        lacking = {cell: raw.lacking(cell, arguments.methods, arguments.rounds) for cell in cells}
        plan = tuple(
            (cell.profile, cell.jitter, numbers[index])
            for index in range(arguments.rounds)
            for cell, numbers in lacking.items()
            if index < len(numbers)
        )
        if plan:
            profiles, jitters = arguments.profile, arguments.jitter
            yield Settings(stages, profiles, jitters, arguments.methods, rounds=arguments.rounds, plan=plan, **common)


def _has_deepspeed() -> bool:
    return (SITE / ".ready").exists()


def _variables() -> Mapping[str, str]:
    """Of the workers' environment: DeepSpeed is found, and computes on the CPU."""
    path = os.pathsep.join(filter(None, (str(ROOT), str(SITE), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "DS_ACCELERATOR": "cpu"} if _has_deepspeed() else {}


def _versions() -> dict[str, str]:
    found = {each.metadata["Name"].lower(): each.version for each in distributions(path=[*sys.path, str(SITE)])}
    return {name: found[name] for name in _VERSIONS if name in found}


if __name__ == "__main__":
    main()
