"""Whether training by readiness gives the losses of other ways to train. Half an hour; everything takes hours.

    python benchmarks/parity/run.py [--full] [--seeds SEED ...] [--iterations N] [--out DIR] [--kept]
        [--results FILE] [--picture FILE] [--quick] [--json]

A tiny GPT of Megatron-core, on four processes of one stage each, is trained by RRFP (the default hint with a split
backward, bf, strict 1F1B; each with and without deterministic=True), by torch's 1F1B, by Megatron's own 1F1B, by RRFP
in Megatron's place, and in one process, microbatches in order. AdamW, 500 iterations of 8 microbatches, an evaluation
every 50. One seed by every method, the two other seeds in one process. --full: every seed by every method, and the
multimodal model of examples/train_multimodal.py, whose encoders are branches of a graph; torch's and Megatron's
schedules cannot run it, and strict 1F1B runs it as a chain.

same bits: one sha256 of all losses by microbatch, of all evaluations and of the parameters at the end is that of one
process. largest: the largest difference of an iteration's mean loss from one process. evaluated: the same for the loss
of evaluations. of seeds: the largest such difference over the one between the seeds at that evaluation.

Trainings that have ended are kept in --out and not repeated, so a run that was stopped goes on where it was; --kept
reports what is there. It measures no speed, so the machine may have other things to do. It needs megatron-core: the
development environment has it. Ends with exit code 1 if a method that is to have one process's bits has others.
`--quick` only shows that everything runs.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

from benchmarks.parity.figures import Outcome, Row, document_of, rows_of
from benchmarks.parity.plot import plot
from benchmarks.parity.settings import (
    EVALUATED_EVERY,
    GPT,
    ITERATIONS,
    METHODS,
    MULTIMODAL,
    SEEDS,
    STAGES,
    Settings,
    wanted,
)
from benchmarks.shared.figures import table_of
from benchmarks.shared.options import parser_of, text_of
from benchmarks.shared.workers import run_workers


def main() -> None:
    """Train what is missing, and print."""
    arguments = _arguments()
    with TemporaryDirectory() as scratch:
        folder = Path(scratch) if arguments.quick else arguments.out
        folder.mkdir(parents=True, exist_ok=True)
        every = list(_settings(arguments))
        if arguments.kept:
            every = [replace(each, methods=tuple(kept_of(each, folder))) for each in every]
        outcomes = [outcome for settings in every for outcome in trained(settings, folder)]
    rows, document = list(rows_of(outcomes)), document_of(outcomes)
    if arguments.results:
        arguments.results.write_text(text_of(document))
    if arguments.picture:
        plot(outcomes, arguments.picture)
    if arguments.json:
        print(json.dumps(document))
    else:
        Console(width=max(Console().width, 130)).print(*map(_table, _grouped(rows)))
    wrong = [f"{row.model}, seed {row.seed}, {row.method}" for row in rows if row.fixes_bits and not row.same_bits]
    if wrong:
        sys.exit(f"other bits than one process: {'; '.join(wrong)}")


def trained(settings: Settings, folder: Path) -> Iterator[Outcome]:
    """The trainings of ``settings``, those that ``folder`` lacks run now and kept there."""
    files = {name: folder / f"{_file_of(settings, name)}.json" for name in settings.methods}
    missing = tuple(name for name, path in files.items() if not path.exists())
    if missing:
        own = replace(settings, methods=missing)
        left = list(missing)
        say = Console(stderr=True).print
        for line in run_workers(Path(__file__).with_name("worker.py"), STAGES, own.to_json(), awaited=lambda: left[0]):
            say(f"{line['model']}, seed {line['seed']}, {line['method']}: {line['seconds']:.0f} s", highlight=False)
            left.remove(line["method"])
            # Written whole or not at all: a run may be stopped here.
            part = files[line["method"]].with_suffix(".part")
            part.write_text(json.dumps(line))
            part.rename(files[line["method"]])
    for path in files.values():
        yield Outcome.of(json.loads(path.read_text()))


def kept_of(settings: Settings, folder: Path) -> Iterator[str]:
    """The methods whose trainings are in ``folder``."""
    return (name for name in settings.methods if (folder / f"{_file_of(settings, name)}.json").exists())


def _file_of(settings: Settings, method: str) -> str:
    parts = settings.model, settings.seed, settings.iterations, settings.evaluated_every, settings.microbatches, method
    return re.sub(r"[^a-z0-9]+", "-", "-".join(map(str, parts)).lower())


def _settings(arguments: argparse.Namespace) -> Iterator[Settings]:
    if arguments.quick:
        for model in (GPT, MULTIMODAL):
            yield Settings(model, SEEDS[0], tuple(METHODS[model]), iterations=4, evaluated_every=2, microbatches=4)
        return
    for model, seed, methods in wanted(full=arguments.full):
        if seed in arguments.seeds:
            every = min(EVALUATED_EVERY, arguments.iterations)
            yield Settings(model, seed, methods, iterations=arguments.iterations, evaluated_every=every)


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--full", action="store_true", help="every seed by every method, and the multimodal model")
    parser.add_argument("--kept", action="store_true", help="train nothing; report the trainings that are kept")
    parser.add_argument("--seeds", nargs="+", type=int, choices=SEEDS, default=SEEDS, help="these only")
    parser.add_argument("--iterations", type=int, default=ITERATIONS, help="of each training, at least 1")
    parser.add_argument("--out", type=Path, default=Path("out/parity"), help="where trainings are kept")
    parser.add_argument("--results", type=Path, metavar="FILE", help="write the results there as JSON")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw them there")
    arguments = parser.parse_args()
    if arguments.iterations < 1:
        parser.error(f"--iterations is {arguments.iterations}, must be at least 1")
    return arguments


def _grouped(rows: Sequence[Row]) -> Iterator[list[Row]]:
    for key in dict.fromkeys((row.model, row.seed) for row in rows):
        yield [row for row in rows if (row.model, row.seed) == key]


def _table(rows: list[Row]) -> Table:
    columns = ("last evaluation", "same bits", "sha256", "largest", "evaluated", "of seeds")
    table = table_of(f"{rows[0].model}, seed {rows[0].seed}", "method", *columns)
    for row in rows:
        bits = "yes" if row.same_bits else "NO" if row.fixes_bits else "no"
        beside = "-" if row.of_spread is None else f"{100 * row.of_spread:.2g}%"
        cells = f"{row.last:.6f}", bits, row.sha256[:12], f"{row.largest:.1e}", f"{row.largest_evaluated:.1e}", beside
        table.add_row(row.method, *cells)
    return table


if __name__ == "__main__":
    main()
