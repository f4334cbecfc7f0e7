"""What dispatching costs, from a decision to the start of a task. Takes about 30 s.

    python benchmarks/dispatch/run.py [--quick] [--json]

decisions: time of one decision and of taking it in (`core.decide`, `core.apply(Enqueued)`), by hint, with so many ready
tasks. "1f1b" is that schedule used as a hint.

arrivals: "filed" is the time from a peer's `transport.send` until the core has taken the arrival in, while the lane is
busy with matrix products on all cores; "nice 10" is the same with the option `lane_nice=10`. "started" is the time from
a peer's `transport.send` until the lane begins the task that the message makes ready, the lane being idle. Peers are on
the same loop, on a loop of another thread, or in another process. "bare" rows are measured in between, for comparison:
half a round trip over plain blocking zmq sockets, and one `call_soon_threadsafe` from another thread.

engine: simulated tasks a second through the real cores (mllm profile, J2, bf, limit 2n; the best run).

Columns p50 and p99 are quantiles. `--quick` only shows that everything runs: its figures mean nothing.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial

from rich.console import Console

from benchmarks.dispatch.decisions import EngineSpeed, time_decisions, time_engine
from benchmarks.dispatch.peer import Peer, rendezvous_in
from benchmarks.dispatch.ranks import GAP_S, FilingClock, Rank, Receiver, Sender
from benchmarks.shared.figures import Aim, Spread, aims_table, table_of, us
from benchmarks.shared.load import OtherLoad
from benchmarks.shared.options import parsed, parser_of
from rrfp.core.tasks import Kind, Task
from rrfp.pipeline.loop_thread import LoopThread
from rrfp.trace.spans import StepTrace, merge
from rrfp.transports.rendezvous import LocalRendezvous

HINTS = ("bf", "b-priority", "1f1b")
READY = (4, 64, 1024)
ENGINE_STAGES = (4, 64)

FILED, FILED_NICE = "filed, zmq/ipc", "filed, nice 10, zmq/ipc"
SAME_LOOP, TWO_LOOPS, ZMQ = "started, inproc, same loop", "started, inproc, two loops", "started, zmq/ipc"
BARE_HOP, BARE_ZMQ = "bare call_soon_threadsafe", "bare zmq, round trip / 2"


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    decisions: int = 600
    rounds: int = 8
    messages: int = 120
    busy_messages: int = 250
    engine_microbatches: int = 256
    engine_repeats: int = 3


QUICK = Size(decisions=20, rounds=1, messages=10, busy_messages=10, engine_microbatches=8, engine_repeats=1)

#: Takes so many samples of one figure, in seconds.
Sampler = Callable[[int], list[float]]


def local_pair(stack: ExitStack, *, loops: int) -> Sampler:
    """Arrival to start over inproc, with the two ranks on one loop or on two."""
    threads = [LoopThread(f"loop-{index}") for index in range(loops)]
    for thread in threads:
        stack.callback(thread.close)
    met = LocalRendezvous()
    programs = (Sender(), Receiver())
    ranks = [
        Rank(stage, threads[stage % loops], program, f"inproc-{loops}", lambda: met, transport="inproc")
        for stage, program in enumerate(programs)
    ]
    for rank in ranks:
        rank.wait()
    stack.callback(lambda: [closing.result() for closing in [rank.close() for rank in ranks]])

    def sample(messages: int) -> list[float]:
        steps = [rank.step(messages) for rank in ranks]
        return starts(merge(step.result() for step in steps))

    return sample


class ProcessPairs:
    """Stage 1 of pairs whose stage 0 is in another process, over zmq."""

    IDLE, BUSY, NICE = "idle", "busy", "nice"

    def __init__(self, stack: ExitStack) -> None:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rrfp-"))
        self.peer = Peer(folder, (self.IDLE, self.BUSY, self.NICE))
        stack.callback(self.peer.join)
        thread = LoopThread("receiver")
        stack.callback(thread.close)
        self._clocks = {pair: FilingClock() for pair in (self.IDLE, self.BUSY, self.NICE)}
        self._ranks = {pair: self._rank(folder, pair, thread) for pair in self._clocks}
        for rank in self._ranks.values():
            rank.wait()
        stack.callback(self._close)

    def _rank(self, folder: str, pair: str, thread: LoopThread) -> Rank:
        clock = self._clocks[pair]
        program = Receiver(None if pair == self.IDLE else clock.enough)
        nice = 10 if pair == self.NICE else 0
        return Rank(1, thread, program, pair, partial(rendezvous_in, folder, pair), hint=lambda: clock, lane_nice=nice)

    def _close(self) -> None:
        self.peer.begin_close()
        for closing in [rank.close() for rank in self._ranks.values()]:
            closing.result()

    def _step(self, pair: str, messages: int) -> StepTrace:
        self._clocks[pair].forget()
        self.peer.begin_step(pair, messages)
        step = self._ranks[pair].step(messages)
        return merge([self.peer.step_trace(), step.result()])

    def started(self, messages: int) -> list[float]:
        """Arrival to start, the lane idle."""
        return starts(self._step(self.IDLE, messages))

    def filed(self, pair: str, messages: int) -> list[float]:
        """Arrival to filed; the first message is what makes the lane busy."""
        trace = self._step(pair, messages + 1)
        filed = self._clocks[pair].filed
        return [filed[task] - sent for task, sent in sends(trace).items() if task.microbatch != 0]


def sends(trace: StepTrace) -> dict[Task, float]:
    """When each message was sent."""
    return {message.task: message.sent for message in trace.messages if message.sent is not None}


def starts(trace: StepTrace) -> list[float]:
    """Seconds from each message's sending to the start of the task that it made ready."""
    started = {span.task.microbatch: span.start for span in trace.tasks if span.stage == 1}
    return [started[task.microbatch] - sent for task, sent in sends(trace).items() if task.kind is Kind.F]


def hops(stack: ExitStack) -> Sampler:
    """Seconds from `call_soon_threadsafe` on another thread to the call."""
    thread = LoopThread("hop")
    stack.callback(thread.close)

    def sample(count: int) -> list[float]:
        samples: list[float] = []
        done = threading.Event()

        def arrive(sent: float) -> None:
            samples.append(time.monotonic() - sent)
            done.set()

        for _ in range(count):
            time.sleep(GAP_S)
            done.clear()
            thread.loop.call_soon_threadsafe(arrive, time.monotonic())
            done.wait()
        return samples

    return sample


def measure_arrivals(size: Size) -> dict[str, Spread]:
    """Every latency, alternating: a round takes some samples of each."""
    with ExitStack() as stack:
        pairs = ProcessPairs(stack)
        samplers: dict[str, tuple[Sampler, int]] = {
            FILED: (lambda count: pairs.filed(pairs.BUSY, count), size.busy_messages),
            FILED_NICE: (lambda count: pairs.filed(pairs.NICE, count), size.busy_messages),
            SAME_LOOP: (local_pair(stack, loops=1), size.messages),
            TWO_LOOPS: (local_pair(stack, loops=2), size.messages),
            BARE_HOP: (hops(stack), size.messages),
            ZMQ: (pairs.started, size.messages),
            BARE_ZMQ: (lambda count: [t / 2 for t in pairs.peer.round_trips(count, GAP_S)], size.messages),
        }
        samples: dict[str, list[float]] = {name: [] for name in samplers}
        for sampler, _ in samplers.values():
            sampler(5)  # warm up
        for _ in range(size.rounds):
            for name, (sampler, count) in samplers.items():
                samples[name] += sampler(count)
        return {name: Spread.of(taken) for name, taken in samples.items()}


def aims_of(arrivals: dict[str, Spread], engine: Sequence[EngineSpeed]) -> list[Aim]:
    """What DESIGN and its users expect."""
    aims = [Aim(f"{name}, p99", arrivals[name].p99 * 1e6, 5000, unit="us") for name in (FILED, FILED_NICE)]
    limits = {SAME_LOOP: 60, TWO_LOOPS: 60, ZMQ: 200}
    aims += [Aim(f"{name}, p50", arrivals[name].p50 * 1e6, limit, unit="us") for name, limit in limits.items()]
    aims += [Aim(f"engine, PP {e.stages}", e.tasks_per_s, 50_000, "at least", "tasks/s") for e in engine]
    return aims


def main() -> None:
    """Measure and print."""
    parser = parser_of("What dispatching costs.")
    arguments = parsed(parser)
    size = QUICK if arguments.quick else Size()

    load = OtherLoad()
    arrivals = measure_arrivals(size)
    decisions = {(h, n): Spread.of(time_decisions(h, n, size.decisions)) for h in HINTS for n in READY}
    engine = [time_engine(stages, size.engine_microbatches, size.engine_repeats) for stages in ENGINE_STAGES]
    aims = aims_of(arrivals, engine)
    if arguments.json:
        plain = {
            "decisions": [{"hint": h, "ready": n, **asdict(spread)} for (h, n), spread in decisions.items()],
            "arrivals": {name: asdict(spread) for name, spread in arrivals.items()},
            "engine": [asdict(speed) for speed in engine],
            "aims": [aim.to_json() for aim in aims],
            "other_load": load.share(),
        }
        print(json.dumps(plain))
        return
    print_tables(decisions, arrivals, engine, aims)
    print(load.sentence())


def print_tables(
    decisions: dict[tuple[str, int], Spread],
    arrivals: dict[str, Spread],
    engine: Sequence[EngineSpeed],
    aims: Sequence[Aim],
) -> None:
    """For people."""
    console = Console()
    table = table_of("us a decision, p50 (p99)", "hint", *(f"{n} ready" for n in READY))
    for hint in HINTS:
        spreads = [decisions[hint, n] for n in READY]
        table.add_row(hint, *(f"{us(spread.p50)} ({us(spread.p99)})" for spread in spreads))
    console.print(table)
    table = table_of("us from an arrival's sending", "until", "p50", "p99", "samples")
    for name, spread in arrivals.items():
        table.add_row(name, us(spread.p50), us(spread.p99), str(spread.samples))
    console.print(table)
    table = table_of("engine", "stages x microbatches", "tasks/s")
    for speed in engine:
        table.add_row(f"{speed.stages} x {speed.microbatches}", f"{speed.tasks_per_s:,.0f}")
    console.print(table, aims_table(aims))


if __name__ == "__main__":
    main()
