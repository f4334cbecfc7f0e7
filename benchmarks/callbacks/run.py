"""What callbacks cost the runtime's loop and the lanes: processor time a step, with and without. Takes two minutes.

    python benchmarks/callbacks/run.py [--quick] [--json] [--rounds N]

Four pipelines of one process, each of four stages whose forward takes a millisecond, train in turns on the same
batches:

- without: no callbacks; without again: the same once more, which shows how far the figures scatter;
- empty: one callback that does nothing, so that the rest is the delivery of events;
- all: those that are shipped. `Progress` draws for a terminal, `TensorBoard` and `Prometheus` take part where
  they are installed.

A turn is some steps, until the reports of the last one are here; the order changes from round to round. Of each thread
the processor's own clock is read before and after. "more" is the median over the rounds of the difference from the
pipeline without in the same round. A machine that does other work slows its processors down, and then this comparison
scatters by much more than callbacks cost. So the functions that serve callbacks are clocked as well, one by one: those
of the loop and those of the caller, each of which a rank calls once a step. What their figures cost in the reports,
which every rank unpacks from all ranks, is the difference from reports without them. The sum of a rank's loop is meant
to be at most 50 us a step, with callbacks; without, `_wake` does not run.
What this does not show is the wait for Python's lock, while a callback holds it. At the end the gradients of all
pipelines are compared bit by bit.

`--quick` only shows that everything runs: its figures mean nothing.
"""

from __future__ import annotations

import io
import json
import struct
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import wraps
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from torch import nn

import rrfp
from benchmarks.shared.clocks import Reading
from benchmarks.shared.figures import Aim, aims_table, table_of, us
from benchmarks.shared.load import OtherLoad
from benchmarks.shared.options import parsed, parser_of
from rrfp.callbacks import Callback, Csv, JsonLines, Progress, Prometheus, TensorBoard
from rrfp.core.usage import Peaks
from rrfp.errors import ConfigError
from rrfp.pipeline.callback_runner import CallbackRunner
from rrfp.pipeline.faces import BlockingPipeline
from rrfp.runtime import records
from rrfp.runtime.steps.reports import ResourceMeter, StageReport
from rrfp.trace.breakdown import Breakdown

STAGES, MICROBATCHES, WIDTH = 4, 8, 16
PARTS = ("loop", "lanes", "callbacks")
WAYS = ("without", "without again", "empty", "all")


@dataclass(frozen=True, slots=True)
class Settings:
    """Of a run.

    Attributes:
        rounds: turns of each pipeline that count; one before warms up.
        steps: of a turn.
    """

    rounds: int = 20
    steps: int = 20


class Clocked:
    """Processor time in the functions that serve callbacks, by function and the thread that runs it."""

    #: The code that a step runs for callbacks outside of their own thread. A rank runs each once a step.
    FUNCTIONS: tuple[tuple[type[Any], str], ...] = (
        (ResourceMeter, "read"),
        (CallbackRunner, "step_begun"),
        (CallbackRunner, "step_ended"),
        (CallbackRunner, "_wake"),
    )

    def __init__(self) -> None:
        self.samples: defaultdict[tuple[str, str], list[float]] = defaultdict(list)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Clock all pipelines of this process meanwhile."""
        with ExitStack() as stack:
            for owner, name in self.FUNCTIONS:
                stack.enter_context(patch.object(owner, name, self._clocked(name, getattr(owner, name))))
            yield

    def rows(self) -> list[dict[str, Any]]:
        """For each function and thread the seconds of a call, without those of reading the clock."""
        return [
            {"function": name, "thread": part, "seconds": max(0.0, median(found)), "calls": len(found)}
            for (name, part), found in sorted(self.samples.items())
        ]

    def _clocked(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*arguments: Any) -> Any:
            # The clock's own time is read at the same place, where caches are as cold as in a step.
            first, second = time.thread_time(), time.thread_time()
            try:
                return function(*arguments)
            finally:
                used = time.thread_time() - second - (second - first)
                self.samples[name, part_of(threading.current_thread().name) or "caller"].append(used)

        return call


@dataclass(slots=True)
class Trainee:
    """A pipeline in turns with another one.

    Attributes:
        pipe: entered.
        modules: its stages.
        threads: the number of each part of it, by the system's.
        seconds: by part, processor seconds a step of each turn.
    """

    pipe: BlockingPipeline
    modules: Sequence[nn.Module]
    threads: dict[int, str]
    seconds: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})

    def turn(self, batches: Sequence[list[torch.Tensor]], *, counts: bool) -> None:
        """Train on ``batches``."""
        before = Reading.now()
        for batch in batches:
            result = self.pipe.step(batch, batch)
        assert result.seconds > 0  # the reports are here
        used = dict.fromkeys(PARTS, 0.0)
        after = Reading.now()
        for number, part in self.threads.items():
            used[part] += (after.threads[number] - before.threads[number]) / len(batches)
        for part in PARTS if counts else ():
            self.seconds[part].append(used[part])

    def gradients(self) -> torch.Tensor:
        """Of all parameters, one behind the other."""
        parameters = [parameter for module in self.modules for parameter in module.parameters()]
        return torch.cat([parameter.grad.flatten() for parameter in parameters if parameter.grad is not None])


@dataclass(frozen=True, slots=True)
class BareReport:
    """A `StageReport` without the field that only callbacks read."""

    stage: int
    seconds: float
    breakdown: Breakdown
    peaks: Peaks
    size_correlation: float | None = None


def seconds_in_reports(repeats: int) -> float:
    """What the field that only callbacks read costs a rank's loop in each step: packed once, unpacked of all ranks."""
    bare = BareReport(1, 0.1, Breakdown(0.1, 0.07, input=0.02, other=0.01), Peaks(3, 1 << 20, 2, 1 << 19))
    whole = StageReport(bare.stage, bare.seconds, bare.breakdown, bare.peaks)
    whole = replace(whole, resources=struct.pack("<4Q", 8, 1 << 30, 1 << 27, 1 << 27))
    more = []
    for number in range(repeats):
        used = {}
        for report in (bare, whole) if number % 2 else (whole, bare):
            before = time.thread_time()
            packed = records.pack(report)
            for _ in range(STAGES):
                records.unpack(type(report), packed, "a step report")
            used[type(report)] = time.thread_time() - before
        more.append(used[StageReport] - used[BareReport])
    return median(more)


def part_of(thread: str) -> str | None:
    """The part of a pipeline that a thread's name says."""
    if thread == "rrfp-local":
        return "loop"
    return "callbacks" if thread == "rrfp-callbacks" else "lanes" if thread.startswith("rrfp-lane") else None


def all_callbacks(folder: Path) -> list[Callback]:
    """Those that are shipped and installed."""
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    made: list[Callback] = [Progress(console=console), JsonLines(folder / "rows.jsonl"), Csv(folder / "rows.csv")]
    with suppress(ConfigError):
        made.append(TensorBoard(folder / "board"))
    with suppress(ConfigError):
        made.append(Prometheus(0))
    return made


class Layer(nn.Module):
    """Takes a millisecond in its forward, as a call of a device would."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(1e-3)
        output: torch.Tensor = self.inner(x)
        return output


def entered(stack: ExitStack, callbacks: list[Callback]) -> Trainee:
    """A pipeline with these callbacks."""
    torch.manual_seed(0)
    modules = [Layer() for _ in range(STAGES)]
    before = {thread.native_id or 0 for thread in threading.enumerate()}
    pipeline = rrfp.local(modules, loss_fn=nn.functional.mse_loss, deterministic=True, callbacks=callbacks)
    pipe = stack.enter_context(pipeline.blocking())
    return Trainee(pipe, modules, _threads_since(before))


def measured(settings: Settings, folder: Path, clocked: Clocked) -> tuple[dict[str, dict[str, list[float]]], list[str]]:
    """Processor seconds a step of each turn, by pipeline and part, and the names of the callbacks."""
    generator = torch.Generator().manual_seed(0)
    callbacks = all_callbacks(folder)
    ways: dict[str, list[Callback]] = dict(zip(WAYS, ([], [], [Callback()], callbacks), strict=True))
    with ExitStack() as stack:
        trainees = {way: entered(stack, own) for way, own in ways.items()}
        for number in range(settings.rounds + 1):
            batches = [list(torch.randn(MICROBATCHES, 2, WIDTH, generator=generator)) for _ in range(settings.steps)]
            first = number % len(WAYS)
            for way in (*WAYS[first:], *WAYS[:first]):
                trainees[way].turn(batches, counts=number > 0)
        with clocked.running():
            for _ in range(settings.rounds):
                trainees["all"].turn(batches, counts=False)
        for way in WAYS[:-1]:  # and the same for the others, whose bits are compared
            for _ in range(settings.rounds):
                trainees[way].turn(batches, counts=False)
        gradients = [trainee.gradients() for trainee in trainees.values()]
    assert all(torch.equal(own, gradients[0]) for own in gradients), "callbacks changed a bit"
    return {way: trainee.seconds for way, trainee in trainees.items()}, [type(each).__name__ for each in callbacks]


def _threads_since(before: set[int]) -> dict[int, str]:
    """The parts of the pipeline that was entered since."""
    found = {thread.native_id or 0: part_of(thread.name) for thread in threading.enumerate()}
    return {number: part for number, part in found.items() if part is not None and number not in before}


def rows_of(seconds: Mapping[str, Mapping[str, Sequence[float]]]) -> list[dict[str, Any]]:
    """For each way and part of a pipeline the seconds a step, and how many more than without callbacks."""
    return [
        {
            "way": way,
            "threads": part,
            "seconds": median(found[part]),
            "more": median(own - plain for own, plain in zip(found[part], seconds["without"][part], strict=True)),
        }
        for way, found in seconds.items()
        for part in PARTS
    ]


def main() -> None:
    """Measure and report."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=Settings().rounds, help="turns of each pipeline, at least 1")
    arguments = parsed(parser, "rounds")
    settings = Settings(rounds=2, steps=3) if arguments.quick else Settings(rounds=arguments.rounds)
    torch.set_num_threads(1)
    load = OtherLoad()
    with tempfile.TemporaryDirectory() as folder:
        clocked = Clocked()
        seconds, names = measured(settings, Path(folder), clocked)
    rows = rows_of(seconds)
    in_reports = {"function": "in reports", "thread": "loop", "seconds": seconds_in_reports(50 * settings.rounds)}
    functions = [*clocked.rows(), in_reports]
    on_loop = sum(row["seconds"] for row in functions if row["thread"] == "loop")
    aims = [Aim("a rank's loop", 1e6 * on_loop, 50.0, unit="us")]
    if arguments.json:
        document = {"settings": asdict(settings), "callbacks": names, "rows": rows, "functions": functions}
        print(json.dumps({**document, "aims": [aim.to_json() for aim in aims], "other_load": load.share()}))
        return
    print(f"all: {', '.join(names)}")
    table = table_of("processor time a step in us", "callbacks", "threads", "time", "more")
    for row in rows:
        table.add_row(row["way"], row["threads"], us(row["seconds"]), f"{1e6 * row['more']:+,.0f}")
    calls = table_of("functions that serve callbacks, in us", "function", "thread", "call")
    for row in functions:
        calls.add_row(row["function"], row["thread"], us(row["seconds"]))
    Console().print(table, calls, aims_table(aims))
    print(load.sentence())


if __name__ == "__main__":
    main()
