"""RRFP beside torch.distributed.pipelining on the same emulated stages. Takes over six minutes.

    python benchmarks/against_torch/run.py [--stages 4 8] [--profile llm mllm] [--jitter J0 J3] [--rounds N]
        [--methods NAME ...] [--all] [--quick] [--json [FILE]]

One process a stage, under torchrun, runs torch's schedules over gloo and RRFP over its default transport, alternating
by step: all methods have the same table in a round. All run the very same modules, which sleep the table's time and put
out 2 MiB. Every round has a table of its own; J0 is without jitter, J3 with the most. M is 32. "--all" is the whole
comparison: both numbers of stages, five rounds. ``sizes`` are left out on llm, where all microbatches are alike.

RRFP's methods have the default hint and a split backward, with the limit that their names give. "V" and ZBV have two
chunks a stage in V placement, on tables that cut each stage's work in two (benchmarks/shared/tables.py); "strict 1f1b"
is unsplit. --methods also takes GPipe, bf and those over zmq; an unknown name prints all.

ms: a step, from one start for all ranks until the last has returned; median, as all figures.
/ bound: over the lower bound that no order, memory or transport can beat, for whole tasks on one chunk, so that a split
or a V can be below 1. / own bound: over that of the method's own table. / torch: over the peer in the same round.
over own: the step's time over that of its own order in the engine, with the table's durations and messages that take no
time, minus 1; "in sleeps" is the part that the engine explains if tasks are as long as they really were.
held: microbatches on the worst stage, and the sum over all stages; MiB: the same in bytes, as the table has them.
"n by own bytes": each stage may hold the bytes that "n, sizes" holds there in the engine.
start: from the call to the first task of stage 0.
end: from the end of the last task until the last rank has returned.
CPU: of all processes, a task (F, B, W), by thread; without the threads of the other runtime, and with what goes on for
50 ms after the step.

Only undisturbed steps count. A step is disturbed if other processes took more than 0.3 cores meanwhile; its time does
not matter. The aims compare with the peer whose tasks are as long (over own order: 1F1B for one chunk, ZBV for a V) or
which sends as many messages a task (CPU: 1F1B for a whole backward, else ZBV).

`--quick` only shows that everything runs: its figures mean nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from benchmarks.against_torch.aims import aims_of
from benchmarks.against_torch.report import document_of, print_report
from benchmarks.against_torch.settings import DEFAULT_METHODS, METHODS, Settings
from benchmarks.shared.comparison import JITTERS, Cell
from benchmarks.shared.load import OtherLoad
from benchmarks.shared.options import check_comparison, parser_of, report
from benchmarks.shared.runs import steps_measured
from benchmarks.shared.step_figures import Figures, results_of
from rrfp.costs import JITTER_LEVELS, PROFILES


def main() -> None:
    """Measure and print."""
    arguments = _arguments()
    load, every = OtherLoad(), list(_settings(arguments))
    results: dict[Cell, Mapping[str, Figures]] = {}
    for settings, steps in steps_measured(Path(__file__).with_name("worker.py"), every):
        results |= results_of(settings, steps)
    aims = aims_of(results)
    document = {"settings": list(map(asdict, every)), **document_of(results, aims), "other_load": load.share()}

    def tables() -> None:
        print_report(results, aims)
        print(load.sentence())

    report(arguments.json, document, tables)


def _arguments() -> argparse.Namespace:
    parser = parser_of("RRFP beside torch.distributed.pipelining.", json_file=True)
    parser.add_argument("--stages", nargs="+", type=int, help="numbers of stages, at least 2")
    parser.add_argument("--profile", nargs="+", choices=list(PROFILES), default=list(PROFILES), help="workloads")
    parser.add_argument("--jitter", nargs="+", choices=list(JITTER_LEVELS), default=list(JITTERS), help="levels")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(DEFAULT_METHODS), help="by name")
    parser.add_argument("--rounds", type=int, help="measured rounds, at least 1")
    parser.add_argument("--all", action="store_true", help="the whole comparison: PP 4 and 8, five rounds")
    arguments = parser.parse_args()
    stages, rounds = ((4, 8), 5) if arguments.all else ((8,), 3)
    arguments.stages = arguments.stages or stages
    arguments.rounds = rounds if arguments.rounds is None else arguments.rounds
    check_comparison(parser, arguments)
    return arguments


def _settings(arguments: argparse.Namespace) -> Iterator[Settings]:
    """One for each number of stages."""
    methods = tuple(name for name in METHODS if name in arguments.methods)
    if arguments.quick:
        yield Settings(2, ("mllm",), JITTERS, methods, microbatches=4, rounds=1)
        return
    for stages in dict.fromkeys(arguments.stages):
        profiles, jitters = tuple(dict.fromkeys(arguments.profile)), tuple(dict.fromkeys(arguments.jitter))
        yield Settings(stages, profiles, jitters, methods, rounds=arguments.rounds)


if __name__ == "__main__":
    main()
