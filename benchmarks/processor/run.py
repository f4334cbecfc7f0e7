"""Processor time that a task takes beside its compute, by thread, with torch's schedules in the same run.

    python benchmarks/processor/run.py [--quick] [--json [FILE]]

Stages multiply by one number, so a task costs what the runtime costs. The systems run in turns; of each the round with
the least processor time counts, since other programs disturb and never help. Rank 0 is measured. Takes two minutes.

used: processor time of the process; loop: of the thread that sends, receives and decides; lane: of the thread that
computes (torch's schedules compute on the caller's, which counts among the others, with the threads of libraries).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.processor.settings import CASES, LANE, LOOP, OTHER, PIPELINE, SCHEDULE, TORCH, Case
from benchmarks.shared.figures import Aim, aims_table, table_of, us
from benchmarks.shared.load import OtherLoad
from benchmarks.shared.options import parser_of, report
from benchmarks.shared.workers import run_workers

WORKER = Path(__file__).with_name("worker.py")

#: Microseconds a task, at most: case, system, thread ("used": all of the process).
MOST_US = (
    (CASES[0].name, SCHEDULE, "used", 150),
    (CASES[0].name, SCHEDULE, LANE, 110),
    (CASES[1].name, PIPELINE, LOOP, 140),
)


def measured(case: Case) -> dict[str, Any]:
    """By system, its round with the least processor time."""
    best: dict[str, Any] = {}
    for line in run_workers(WORKER, case.ranks, json.dumps(asdict(case)), awaited=lambda: case.name, patience=180.0):
        if line["system"] not in best or line["used"] < best[line["system"]]["used"]:
            best[line["system"]] = line
    return best


def aims(results: dict[str, dict[str, Any]]) -> Iterator[Aim]:
    """What the figures should be."""
    for case, system, thread, most in MOST_US:
        figures = results[case][system]
        seconds = figures["used"] if thread == "used" else figures["roles"].get(thread, 0.0)
        yield Aim(f"{case}: {system}, {thread}", seconds * 1e6, most, unit="us")


def main() -> None:
    """Run what the command line asks for."""
    arguments = parser_of(__doc__, json_file=True).parse_args()
    cases = [replace(case, warm_up=1, steps=1, rounds=1) for case in CASES] if arguments.quick else CASES
    load = OtherLoad()
    results = {case.name: measured(case) for case in cases}
    found = list(aims(results))

    def tables() -> None:
        console = Console()
        for case, systems in results.items():
            table = table_of(f"{case}, us a task", "system", "used", LOOP, LANE, OTHER, "wall")
            for system in (TORCH, PIPELINE, SCHEDULE):
                figures = systems[system]
                threads = [us(figures["roles"].get(role, 0.0)) for role in (LOOP, LANE, OTHER)]
                table.add_row(system, us(figures["used"]), *threads, us(figures["wall"]))
            console.print(table)
        console.print(aims_table(found))
        console.print(load.sentence())

    report(
        arguments.json, {"cases": results, "aims": [aim.to_json() for aim in found], "other_load": load.share()}, tables
    )


if __name__ == "__main__":
    main()
