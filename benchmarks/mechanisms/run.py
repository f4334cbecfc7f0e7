"""What each mechanism of the paper changes on the real runtime, beside the engine and the paper. Eight minutes.

    python benchmarks/mechanisms/run.py [--rounds N] [--methods NAME ...] [--cells CELL ...] [--no-tp | --only-tp]
        [--quick] [--json [FILE]]

PP 8, 32 microbatches, mllm with jitter J3 and llm without; one process a stage on the stages of benchmarks/peers, which
sleep a table's time and put out 2 MiB. All methods alternate by step and have the same table in a round. A row is a
method beside the one that differs in one mechanism only:

messages: strict 1F1B of RRFP, whose messages leave while the stage goes on, beside the same order as Megatron runs it,
where a stage sends and receives in fixed places and waits until the other stage has done so too; the same where a
message takes 5 ms.
readiness: a schedule as a hint, which overtakes tasks that are not ready, beside the same schedule run strictly; and bf
in the same memory.
hint, limit: others beside bf and the default, all within 2n unless their name says otherwise. bf and f-priority have a
whole backward, bfw and the default a split one.
all of them: the paper's comparison, 1F1B with blocking messages beside bf and bfw.
late readiness: every message is there, and reported so many milliseconds later.
TP: groups of two ranks a stage, whose tasks begin with a collective: a leader's orders beside an agreement by
all-gather at every task, as the paper has it (benchmarks/tp has the columns). --only-tp measures nothing else, three
minutes, and leaves the other tables of --json FILE as they are.

/ bound: over the lower bound of the table. / base: over the method in the row's second column in the same rounds. Both
are medians with their intervals of 95%: of five rounds the least and the most, which cover 94%, of four 88%. engine:
the same tables in the simulator, where the runtime and messages take no time. paper: on its workload in the cell's
place at TP 1, PP 8 (GPT3-Large; Qwen3-1.7B+ViT-H), where it has one. Only undisturbed steps count: those in which other
processes took less than 0.3 cores.

The paper's statistics of messages are those of one 1F1B run: "blocking 1F1B" has the times of calls that send and
receive, the others those of messages from sending to filing.

The last table has the same pairs at PP 4, 8 and 16 in the engine alone. `--quick` only shows that everything runs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

from benchmarks.mechanisms.coordination import TP, Coordinated, measured
from benchmarks.mechanisms.coordination import plain as plain_tp
from benchmarks.mechanisms.figures import SIMULATED, Row, Simulated, plain, rows_of, simulated, steps_data
from benchmarks.mechanisms.messages import MessageTimes, messages_of
from benchmarks.mechanisms.settings import METHODS, Settings
from benchmarks.paper.claims import MESSAGE_MIDDLE, MESSAGE_SPREAD
from benchmarks.shared.comparison import Cell, Turn
from benchmarks.shared.figures import table_of
from benchmarks.shared.load import OtherLoad
from benchmarks.shared.options import parser_of, report, text_of
from benchmarks.shared.runs import steps_measured
from benchmarks.shared.steps import Step
from benchmarks.tp.settings import Settings as TpSettings

STAGES = 8
#: By name: profile and jitter.
CELLS = {"mllm-J3": ("mllm", "J3"), "llm-J0": ("llm", "J0")}
_MARK, _NOTHING = "†", "-"


def main() -> None:
    """Measure and print."""
    arguments = _arguments()
    if arguments.only_tp:
        _only_groups(arguments)
        return
    load = OtherLoad()
    with TemporaryDirectory() as folder:
        own = replace(_settings(arguments), folder=folder)
        [(settings, steps)] = steps_measured(Path(__file__).with_name("worker.py"), [own])
        rows, messages = list(rows_of(settings, steps)), list(_messages(settings, steps))
    groups = [] if arguments.no_tp else _groups(arguments)
    cells = SIMULATED[:1] if arguments.quick else SIMULATED
    engine = list(simulated(cells, 1 if arguments.quick else 3))
    document = {
        "settings": {**asdict(settings), "folder": ""},
        "rows": [plain(row) for row in rows],
        "tp": [plain_tp(row) for row in groups],
        "messages": [{**asdict(each), "cell": str(each.cell)} for each in messages],
        "simulated": [plain(row) for row in engine],
        "steps": steps_data(steps),
        "other_load": load.share(),
    }

    def tables() -> None:
        console = _console()
        for cell in dict.fromkeys(row.cell for row in rows):
            console.print(_rows_table(cell, [row for row in rows if row.cell == cell]))
        if groups:
            console.print(_tp_table(groups))
        console.print(_messages_table(messages), _simulated_table(engine))
        if any(row.is_disturbed for row in rows):
            print(f"{_MARK}: no round was undisturbed, and all are used")
        print(load.sentence())

    report(arguments.json, document, tables, text_of)


def _only_groups(arguments: argparse.Namespace) -> None:
    """Measure groups of ranks; what else a file has stays."""
    load = OtherLoad()
    groups = _groups(arguments)
    others = json.loads(Path(arguments.json).read_text()) if arguments.json else {}
    document = {**others, "tp": [plain_tp(row) for row in groups], "other_load_tp": load.share()}

    def tables() -> None:
        _console().print(_tp_table(groups))
        print(load.sentence())

    report(arguments.json, document, tables, text_of)


def _groups(arguments: argparse.Namespace) -> list[Coordinated]:
    stages, microbatches, rounds = (2, 4, 1) if arguments.quick else (STAGES, 32, arguments.rounds)
    cells = [CELLS[name] for name in dict.fromkeys(arguments.cells)]
    every = [TpSettings(TP, stages, microbatches, rounds, profile, jitter) for profile, jitter in cells]
    return [row for settings in every for row in measured(settings)]


def _console() -> Console:
    return Console(width=max(Console().width, 170))


def _messages(settings: Settings, steps: Sequence[Step]) -> Iterator[MessageTimes]:
    quiet = {step.turn for step in steps if step.turn.number and not step.is_disturbed}
    known = {(cell, method) for cell, _, method in quiet}

    def is_used(cell: Cell, number: int, method: str) -> bool:
        return Turn(cell, number, method) in quiet or (cell, method) not in known

    return messages_of(Path(settings.folder), settings.stages, is_used)


def _arguments() -> argparse.Namespace:
    parser = parser_of("What each mechanism changes.", json_file=True)
    parser.add_argument("--rounds", type=int, default=5, help="measured steps of each method in each cell, at least 1")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS), help="these only")
    parser.add_argument("--cells", nargs="+", choices=list(CELLS), default=list(CELLS), help="these only")
    groups = parser.add_mutually_exclusive_group()
    groups.add_argument("--no-tp", action="store_true", help="leave groups of ranks out")
    groups.add_argument("--only-tp", action="store_true", help="measure only them, and keep what else the file has")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds is {arguments.rounds}, must be at least 1")
    if arguments.json and not Path(arguments.json).absolute().parent.is_dir():
        parser.error(f"--json is {arguments.json}, must be a file in a folder that exists")
    if arguments.only_tp and arguments.json and not Path(arguments.json).is_file():
        parser.error(f"--json is {arguments.json}, must be with --only-tp a file that this command has written")
    return arguments


def _settings(arguments: argparse.Namespace) -> Settings:
    methods = tuple(name for name in METHODS if name in arguments.methods)
    profiles, jitters = zip(*(CELLS[name] for name in dict.fromkeys(arguments.cells)), strict=True)
    if arguments.quick:
        return Settings(2, profiles, jitters, methods, microbatches=4, rounds=1)
    return Settings(STAGES, profiles, jitters, methods, rounds=arguments.rounds)


def _rows_table(cell: Cell, rows: Sequence[Row]) -> Table:
    columns = ("beside", "ms", "/ bound [95%]", "engine", "held (sum)", "/ base [95%]", "engine", "paper", "rounds")
    table = table_of(str(cell), "method", *columns)
    mechanism = ""
    for row in rows:
        if row.mechanism != mechanism:
            mechanism = row.mechanism
            table.add_section()
            table.add_row(f"[bold]{mechanism}[/bold]")
        table.add_row(
            f"  {row.method}" + (f" {_MARK}" if row.is_disturbed else ""),
            row.base,
            f"{row.seconds * 1e3:,.0f}",
            _measured(row.per_bound, row.per_bound_interval),
            f"{row.simulated_per_bound:.3f}",
            f"{row.held[0]:g} ({row.held[1]:g})",
            _measured(row.ratio, row.ratio_interval),
            f"{row.simulated:.3f}",
            _NOTHING if row.paper is None else f"{row.paper:.3f}",
            str(row.rounds),
        )
    return table


def _measured(value: float, interval: tuple[float, float]) -> str:
    low, high = interval
    return f"{value:.3f} [{low:.3f}-{high:.3f}]"


def _tp_table(rows: Sequence[Coordinated]) -> Table:
    columns = ("/ leader, depth 2 [95%]", "engine", "coordination", "engine", "paper", "messages a task")
    table = table_of(f"TP {TP}: bf, 2n", "method", *columns)
    for row in rows:
        paper = _NOTHING if row.paper_share is None else f"{row.paper_share:.2%}"
        shares = f"{row.share:.2%}", f"{row.simulated_share:.2%}", paper
        ratios = _measured(row.ratio, row.ratio_interval), f"{row.simulated:.3f}"
        table.add_row(f"{row.cell}: {row.method}", *ratios, *shares, f"{row.messages:.1f}")
    return table


def _messages_table(messages: Sequence[MessageTimes]) -> Table:
    table = table_of("times of messages", "method", "p50 ms", "(p95 - p5) / p50", "(p75 - p25) / p50", "messages")
    table.add_row("the paper's 1F1B", _NOTHING, f"{MESSAGE_SPREAD:.2f}", f"{MESSAGE_MIDDLE:.2f}", _NOTHING)
    for each in messages:
        figures = f"{each.p50 * 1e3:.2f}", f"{each.outer:.2f}", f"{each.middle:.2f}", f"{each.count:,}"
        table.add_row(f"{each.cell}: {each.method}", *figures)
    return table


def _simulated_table(rows: Sequence[Simulated]) -> Table:
    cells = list(dict.fromkeys(row.cell for row in rows))
    names = [f"{cell.stages} {cell.profile} {cell.jitter}" for cell in cells]
    table = table_of("over the base, in the engine alone", "method", "beside", *names)
    found = {(row.mechanism, row.method, row.base, row.cell): row.ratio for row in rows}
    for mechanism, method, base in dict.fromkeys(key[:3] for key in found):
        table.add_row(method, base, *(f"{found[mechanism, method, base, cell]:.3f}" for cell in cells))
    return table


if __name__ == "__main__":
    main()
