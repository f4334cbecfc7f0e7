"""Suspends a training job again and again: does it go on, and does it print anything? 300 stops take 10 minutes.

    python benchmarks/suspend/run.py [--quick] [--json] [--stops N] [--jobs N] [--timer]

Jobs of four processes train over shared memory with ``stall_after=1``. All processes of a job are stopped by SIGSTOP
for 2.6 seconds, longer than it takes until a stuck process prints its stacks. Every other time the helpers that would
print them are stopped as well, as by a suspended machine. Then SIGCONT goes to all in any order, and every rank has to
finish two steps more. Counted are stops after which a process ended or made no step within 30 s (the job is started
anew then), and those after which a process printed anything.

With ``--timer`` each process also arms `faulthandler.dump_traceback_later` again and again, as rrfp did once: it fires
in a process that was stopped, and reads frames of threads that run. So this program does find what it looks for.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import FileStore  # type: ignore[attr-defined]

import rrfp
from benchmarks.shared.options import parsed, parser_of
from rrfp.transports.rendezvous import StoreRendezvous

RANKS, WIDTH, MICROBATCHES = 4, 64, 4
STALL_S = 1.0
STOPPED_S = 2.6
GOES_ON_S, STARTS_S = 30.0, 180.0


@dataclass
class Outcome:
    """Of some stops.

    Attributes:
        stops: how many.
        crashes: exit codes of the processes that had ended, one list for each stop that a job did not survive.
        printed: what was printed after a stop that all survived.
    """

    stops: int = 0
    crashes: list[list[int | None]] = field(default_factory=list)
    printed: list[str] = field(default_factory=list)


class Job:
    """Four processes that train until they are killed."""

    def __init__(self, context: BaseContext, folder: Path, *, timer: bool = False, **options: Any) -> None:
        self._errors = [folder / f"stderr-{rank}" for rank in range(RANKS)]
        self._seen = [0] * RANKS
        self._steps = context.RawArray("q", RANKS)
        self._processes: list[BaseProcess] = []
        for rank, errors in enumerate(self._errors):
            arguments = (rank, str(folder / "store"), str(errors), self._steps, timer, options)
            self._processes.append(context.Process(target=_train, args=arguments))  # type: ignore[attr-defined]
            self._processes[-1].start()
        if not self.goes_on(by=3, within_s=STARTS_S):
            self.kill()
            raise SystemExit(f"the job does not start: {self.printed()}")

    @property
    def ranks(self) -> list[int]:
        """The process ids of the ranks."""
        return [process.pid for process in self._processes if process.pid is not None]

    @property
    def helpers(self) -> list[int]:
        """The process ids of their children."""
        children = [each for pid in self.ranks for each in Path(f"/proc/{pid}/task").glob("*/children")]
        return [int(pid) for each in children for pid in each.read_text().split()]

    @property
    def ended(self) -> list[int | None]:
        """The exit codes of the processes that have ended."""
        return [process.exitcode for process in self._processes if not process.is_alive()]

    def suspend(self, seconds: float, choices: random.Random, *, helpers: bool) -> None:
        """Stop all processes for ``seconds``; with or without their helpers."""
        pids = self.ranks + (self.helpers if helpers else [])
        choices.shuffle(pids)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        choices.shuffle(pids)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)

    def goes_on(self, by: int = 2, within_s: float = GOES_ON_S) -> bool:
        """Whether every rank finishes so many steps more, and no process ends."""
        aims, until = [steps + by for steps in self._steps], time.monotonic() + within_s
        while any(steps < aim for steps, aim in zip(self._steps, aims, strict=True)):
            if self.ended or time.monotonic() > until:
                return False
            time.sleep(0.01)
        return True

    def printed(self) -> str:
        """What the processes printed since the last call."""
        texts = [path.read_text(errors="replace") if path.exists() else "" for path in self._errors]
        new = "".join(text[seen:] for text, seen in zip(texts, self._seen, strict=True))
        self._seen = [len(text) for text in texts]
        return new

    def kill(self) -> None:
        """End it."""
        for process in self._processes:
            process.kill()
            process.join()


def _train(rank: int, store: str, errors: str, steps: Any, timer: bool, options: dict[str, Any]) -> None:
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    if timer:
        threading.Thread(target=_arm_for_ever, daemon=True).start()
    torch.manual_seed(rank)
    stage = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    batch = [torch.randn(8, WIDTH) for _ in range(MICROBATCHES)]
    settings: Any = {"transport": "shm", "stall_after": STALL_S, **options}
    pipeline = rrfp.Pipeline(
        stage,
        topology=rrfp.Topology(rank, RANKS),
        rendezvous=StoreRendezvous(FileStore(store, RANKS), run_id="suspend"),
        loss_fn=nn.functional.mse_loss,
        **settings,
    )
    with pipeline.blocking() as pipe:
        while True:
            pipe.step(batch, batch)
            steps[rank] += 1


def _arm_for_ever() -> None:
    while True:
        faulthandler.dump_traceback_later(2 * STALL_S, file=2)
        time.sleep(STALL_S / 4)


def suspend(context: BaseContext, stops: int, seed: int, *, timer: bool = False, **options: Any) -> Outcome:
    """Suspend a job so often; one that does not survive is followed by another."""
    outcome, choices = Outcome(), random.Random(seed)
    while outcome.stops < stops:
        with tempfile.TemporaryDirectory() as folder:
            job = Job(context, Path(folder), timer=timer, **options)
            job.printed()
            try:
                while outcome.stops < stops and _survives(job, outcome, choices):
                    pass
            finally:
                job.kill()
    return outcome


def _survives(job: Job, outcome: Outcome, choices: random.Random) -> bool:
    """Suspend ``job`` once, at any moment."""
    time.sleep(choices.uniform(0.0, 0.5))
    outcome.stops += 1
    job.suspend(STOPPED_S, choices, helpers=outcome.stops % 2 == 0)
    survives = job.goes_on()
    text = job.printed()
    if not survives:
        outcome.crashes.append(job.ended)
    elif text:
        outcome.printed.append(text)
    return survives


def _report(outcomes: Sequence[Outcome]) -> str:
    stops = sum(outcome.stops for outcome in outcomes)
    crashes = [codes for outcome in outcomes for codes in outcome.crashes]
    printed = [text for outcome in outcomes for text in outcome.printed]
    lines = [f"{stops} stops of {RANKS} processes, {len(crashes)} not survived, {len(printed)} with something printed"]
    lines += [f"exit codes {codes}" for codes in crashes]
    lines += [f"printed: {text.splitlines()[0]}" for text in printed[:20]]
    return "\n".join(lines)


def main() -> None:
    """Run from the command line; exits with 1 if a stop was not survived, or something was printed."""
    parser = parser_of(__doc__)
    parser.add_argument("--stops", type=int, default=300, help="of all jobs together")
    parser.add_argument("--jobs", type=int, default=2, help="at the same time")
    parser.add_argument("--timer", action="store_true", help="arm faulthandler's timer, as rrfp did once")
    arguments = parsed(parser, "stops", "jobs")
    stops = 2 if arguments.quick else -(-arguments.stops // arguments.jobs)
    seeds = range(1 if arguments.quick else arguments.jobs)
    context = get_context("fork")
    with ThreadPoolExecutor(len(seeds)) as pool:
        outcomes = list(pool.map(lambda seed: suspend(context, stops, seed, timer=arguments.timer), seeds))
    if arguments.json:
        import json

        print(json.dumps([asdict(outcome) for outcome in outcomes]))
    else:
        print(_report(outcomes))
    raise SystemExit(any(outcome.crashes or outcome.printed for outcome in outcomes))


if __name__ == "__main__":
    main()
