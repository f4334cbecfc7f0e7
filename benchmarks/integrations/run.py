"""RRFP in the place of torch's and of Megatron's schedules, on the same stages. Takes about a quarter of an hour.

    python benchmarks/integrations/run.py [--part schedules case megatron] [--stages N ...] [--profile llm mllm]
        [--rounds N] [--quick] [--json [FILE]]

One process a rank, under torchrun, builds stock stages around modules that sleep a cost table's time, as in
benchmarks/peers. All schedules of a layout run the very same stage objects, alternating by step: all have the
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

megatron: Megatron-core's own schedules over gloo, 1F1B (one chunk a rank) and interleaved (looped, two), beside what
rrfp.integrations.megatron puts in their place, on the same model chunks, which sleep as above. "window" is the default
limit, what Megatron's own schedule holds; M is 32, PP 4. A table more sets each beside the engine, which runs the same
costs with the method's hint, limit and order, and messages that take no time (for 1F1B with sends that wait, as
Megatron's do), and processor time a task beside that of Megatron's schedule. Without jitter all is run once more with
messages of 4 KiB, whose processor time is the runtimes' alone.

The columns, the rule for undisturbed steps and the checks of every step are those of benchmarks/peers.
"/ bound" is over the lower bound for whole tasks on one chunk, "/ own bound" over that of the method's own table; in
the case they are one. "held" is the most microbatches on the worst rank, and the sum over all ranks.

`--quick` only shows that everything runs: its figures mean nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from benchmarks.integrations.beside_megatron import aims_of, beside_engine, engine_table
from benchmarks.integrations.settings import CASE, CASE_JITTERS, CASE_PROFILE, MEGATRON, SCHEDULES, SMALL, Settings
from benchmarks.shared.comparison import JITTERS, NUM_BYTES
from benchmarks.shared.figures import aims_table
from benchmarks.shared.load import OtherLoad
from benchmarks.shared.options import check_comparison, parser_of, report
from benchmarks.shared.runs import steps_measured
from benchmarks.shared.step_figures import Results, results_of
from benchmarks.shared.step_report import cpu_table, discarded, figures_data, times_table
from rrfp.costs import PROFILES

PARTS = ("schedules", "case", "megatron")

#: PP of the case, and its microbatches.
_CASE_STAGES, _CASE_MICROBATCHES = (2, 4), 8

#: PP of the comparison with Megatron.
_MEGATRON_STAGES = 4


def main() -> None:
    """Measure and print."""
    arguments = _arguments()
    load, every = OtherLoad(), list(_settings(arguments))
    measured: list[tuple[Settings, Results]] = []
    for settings, steps in steps_measured(Path(__file__).with_name("worker.py"), every):
        measured.append((settings, results_of(settings, steps)))
        if arguments.json != "":  # a run that is stopped has shown what it measured
            _print(*measured[-1])
    document = {
        "settings": list(map(asdict, every)),
        "figures": [
            {"num_bytes": settings.num_bytes, **line}
            for settings, results in measured
            for line in figures_data(results)
        ],
        "beside_engine": [
            {"num_bytes": settings.num_bytes, **cell._asdict(), **beside_engine(settings, cell, figures)}
            for settings, results in measured
            for cell, figures in results.items()
            if settings.runs_megatron
        ],
        "aims": [aim.to_json() for settings, results in measured for aim in aims_of(settings, results)],
        "other_load": load.share(),
    }

    report(arguments.json, document, lambda: print(load.sentence()))


def _print(settings: Settings, results: Results) -> None:
    console = Console(width=max(Console().width, 190))
    console.print(f"messages of {settings.num_bytes >> 10:,} KiB", highlight=False)
    for cell, figures in results.items():
        console.print(times_table(cell, figures, [name for name in Settings.PEERS if name in figures]))
        if settings.runs_megatron:
            console.print(cpu_table(cell, figures), engine_table(settings, cell, figures))
    if settings.profiles == (CASE_PROFILE,):
        console.print(f"{CASE_PROFILE} is an emulation on the CPU.", highlight=False)
    if aims := list(aims_of(settings, results)):
        console.print(aims_table(aims))
    for line in discarded(results):
        console.print(line, soft_wrap=True, highlight=False)


def _arguments() -> argparse.Namespace:
    parser = parser_of("RRFP in the place of torch's and Megatron's schedules.", json_file=True)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure")
    parser.add_argument("--stages", nargs="+", type=int, default=[8], help="of torch's schedules, at least 2")
    parser.add_argument("--profile", nargs="+", choices=list(PROFILES), default=["llm", "mllm"], help="workloads")
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
            "megatron": (("llm",), JITTERS[-1:], MEGATRON),
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
            sizes = {"microbatches": _CASE_MICROBATCHES, "rounds": arguments.rounds, "num_bytes": SMALL}
            yield Settings(stages, (CASE_PROFILE,), jitters, tuple(CASE), **sizes)
    if "megatron" in arguments.part:
        profiles = tuple(dict.fromkeys(arguments.profile))
        for jitters, num_bytes in ((JITTERS, NUM_BYTES), (JITTERS[:1], SMALL)):
            sizes = {"rounds": arguments.rounds, "num_bytes": num_bytes}
            yield Settings(_MEGATRON_STAGES, profiles, jitters, tuple(MEGATRON), **sizes)


if __name__ == "__main__":
    main()
