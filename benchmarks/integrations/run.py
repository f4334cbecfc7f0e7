"""ScheduleRRFP beside torch's schedules on the same PipelineStage objects. Takes about ten minutes.

    python benchmarks/integrations/run.py [--part schedules case] [--stages N ...] [--profile llm mllm]
        [--rounds N] [--quick] [--json [FILE]]

One process a rank, under torchrun, builds stock stages around modules that sleep a cost table's time, as in
benchmarks/against_torch. All schedules of a layout run the very same stage objects, alternating by step: all have the
same table in a round. torch's messages travel by gloo, RRFP's by its default transport.

schedules: torch's Schedule1F1B (one stage a rank), ScheduleInterleaved1F1B (looped, two) and ScheduleZBVZeroBubble (in
a V, two), beside ScheduleRRFP with its default hint. RRFP's names say where the stages lie, and the limit: 2n is the
default; "as torch" is what the interleaved schedule holds on each rank, rounded up to whole microbatches ("held" says
how much of it was used). Backward is split where the name says so, and in a V. Two stages a rank are the layers of one,
each half as long. 8 stages, M is 32, J0 is without jitter, J3 with the most.

case: the case of pytorch#172668, an EMULATION on the CPU. ScheduleInterleaved1F1B, PP 2 and PP 4, two stages a rank,
8 microbatches, F 20 ms and B 40 ms, without jitter and with factors exp(0.4 z), in three ways. posted: a RECV is only
posted, as gloo does by itself. stream: all P2P operations of a rank run one after the other, in their order, so that a
SEND waits behind an earlier RECV. occupied: a RECV occupies the rank until it has landed, as the issue reports of
devices on which its kernel keeps the collectives of a forward from starting. RRFP posts no RECV, and runs as it is.
Where RECVs cost nothing, RRFP gains nothing by this: compare with "posted".

The columns, the rule for undisturbed steps and the checks of every step are those of benchmarks/against_torch.
"/ bound" is over the lower bound for whole tasks on one chunk, "/ own bound" over that of the method's own table; in
the case they are one. "held" is the most microbatches on the worst rank, and the sum over all ranks.

`--quick` only shows that everything runs: its figures mean nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from benchmarks.integrations.settings import CASE, CASE_JITTERS, CASE_PROFILE, SCHEDULES, Settings
from benchmarks.shared.comparison import JITTERS, Cell
from benchmarks.shared.load import OtherLoad
from benchmarks.shared.options import check_comparison, parser_of, report
from benchmarks.shared.runs import steps_measured
from benchmarks.shared.step_figures import Figures, results_of
from benchmarks.shared.step_report import discarded, figures_data, times_table
from rrfp.costs import PROFILES

PARTS = ("schedules", "case")

#: PP of the case, and its microbatches.
_CASE_STAGES, _CASE_MICROBATCHES = (2, 4), 8


def main() -> None:
    """Measure and print."""
    arguments = _arguments()
    load, every = OtherLoad(), list(_settings(arguments))
    results: dict[Cell, Mapping[str, Figures]] = {}
    for settings, steps in steps_measured(Path(__file__).with_name("worker.py"), every):
        results |= results_of(settings, steps)
    document = {
        "settings": list(map(asdict, every)),
        "figures": figures_data(results),
        "other_load": load.share(),
    }

    def tables() -> None:
        _print(results)
        print(load.sentence())

    report(arguments.json, document, tables)


def _print(results: Mapping[Cell, Mapping[str, Figures]]) -> None:
    console = Console(width=max(Console().width, 190))
    for cell, figures in results.items():
        console.print(times_table(cell, figures, [name for name in Settings.PEERS if name in figures]))
    if any(cell.profile == CASE_PROFILE for cell in results):
        console.print(f"{CASE_PROFILE} is an emulation on the CPU.", highlight=False)
    for line in discarded(results):
        console.print(line, soft_wrap=True, highlight=False)


def _arguments() -> argparse.Namespace:
    parser = parser_of("ScheduleRRFP beside torch's schedules on the same stages.", json_file=True)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure")
    parser.add_argument("--stages", nargs="+", type=int, default=[8], help="of the schedules, at least 2")
    parser.add_argument("--profile", nargs="+", choices=list(PROFILES), default=list(PROFILES), help="workloads")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds, at least 1")
    arguments = parser.parse_args()
    check_comparison(parser, arguments)
    return arguments


def _settings(arguments: argparse.Namespace) -> Iterator[Settings]:
    """One for each set of processes."""
    if arguments.quick:
        quick = {
            "schedules": (("llm",), JITTERS[-1:], SCHEDULES),
            "case": ((CASE_PROFILE,), tuple(CASE_JITTERS)[-1:], CASE),
        }
        for part in dict.fromkeys(arguments.part):
            profiles, jitters, methods = quick[part]
            yield Settings(2, profiles, jitters, tuple(methods), microbatches=4, rounds=1)
        return
    if "schedules" in arguments.part:
        profiles = tuple(dict.fromkeys(arguments.profile))
        for stages in dict.fromkeys(arguments.stages):
            yield Settings(stages, profiles, JITTERS, tuple(SCHEDULES), rounds=arguments.rounds)
    if "case" in arguments.part:
        for stages in _CASE_STAGES:
            jitters = tuple(CASE_JITTERS)
            yield Settings(stages, (CASE_PROFILE,), jitters, tuple(CASE), _CASE_MICROBATCHES, arguments.rounds)


if __name__ == "__main__":
    main()
