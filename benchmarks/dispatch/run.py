"""What dispatching costs, from a decision to the start of a task. Takes about a minute.

    python benchmarks/dispatch/run.py [--quick] [--json [FILE]]

decisions: time of one decision and of taking it in (`core.decide`, `core.apply(Enqueued)`), by hint, with so many ready
tasks. "1f1b" is that schedule used as a hint.

arrivals: "filed" is the time from a peer's `transport.send` until the core has taken the arrival in, while the lane is
busy with matrix products on all cores; "nice 10" is the same with the option `lane_nice=10`. "started" is the time from
a peer's `transport.send` until the lane begins the task that the message makes ready, the lane being idle. "lane idle"
is the time from the end of a task to the start of the next one, which was ready all the time; each sends a message.
Peers are on the same loop, on a loop of another thread, or in another process. "bare" rows are measured in between, for
comparison: one `call_soon_threadsafe` from another thread; a message on a Unix socket of type SEQPACKET, which a thread
reads and hands to the loop in that way; half a round trip over plain blocking zmq sockets. Aims "above" a bare row
compare the medians of a round, and take the median over the rounds.

outputs: time of a task of a stage that computes next to nothing, with and without the watch over outputs that are
written after they were returned; in turns, on one thread.

garbage collection: time of a full one, which stops all threads of a process, before `gc.freeze()` and after it.

engine: simulated tasks a second through the real cores (mllm profile, J2, bf, limit 2n; the best run).

Both processes call `gc.freeze()` once all is set up, as docs/how-to/slow-step.md advises.

Columns p50, p90 and p99 are quantiles. `--quick` only shows that everything runs: its figures mean nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console

from benchmarks.dispatch import arrivals
from benchmarks.dispatch.arrivals import Samples
from benchmarks.dispatch.decisions import EngineSpeed, time_decisions, time_engine
from benchmarks.dispatch.garbage import time_collections
from benchmarks.dispatch.outputs import CASES, WatchCost, time_watch
from benchmarks.shared.figures import Aim, Spread, aims_table, table_of, us
from benchmarks.shared.load import OtherLoad
from benchmarks.shared.options import parsed, parser_of, report, text_of

HINTS = ("bf", "b-priority", "1f1b")
READY = (4, 64, 1024)
ENGINE_STAGES = (4, 64)

#: Microseconds, at most: until an arrival is filed, p99, the lane busy.
MOST_FILED_US = 1000
#: Microseconds that watching outputs may add to a task.
MOST_WATCHING_US = 20
#: Microseconds that a task may start after a bare message would have arrived: row, bare row, aim.
MOST_ABOVE_US = (
    (arrivals.SAME_LOOP, arrivals.BARE_HOP, 60),
    (arrivals.TWO_LOOPS, arrivals.BARE_HOP, 60),
    (arrivals.STARTED, arrivals.BARE_SOCKET, 90),
)


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    decisions: int = 600
    rounds: int = 8
    messages: int = 120
    busy_messages: int = 250
    engine_microbatches: int = 256
    engine_repeats: int = 3
    watched_rounds: int = 20
    watched_microbatches: int = 200
    collections: int = 20


QUICK = Size(
    decisions=20,
    rounds=1,
    messages=10,
    busy_messages=10,
    engine_microbatches=8,
    engine_repeats=1,
    watched_rounds=1,
    watched_microbatches=5,
    collections=1,
)


def aims_of(samples: Samples, engine: Sequence[EngineSpeed], watching: Sequence[WatchCost]) -> list[Aim]:
    """For RRFP's default transports; zmq is a further row."""
    spreads = arrivals.spreads_of(samples)
    aims = [
        Aim(f"{row}, p99", spreads[row].p99 * 1e6, MOST_FILED_US, unit="us")
        for row in (arrivals.FILED, arrivals.FILED_NICE)
    ]
    aims += [
        Aim(f"{row}, above {bare}, p50", arrivals.above(samples, row, bare) * 1e6, limit, unit="us")
        for row, bare, limit in MOST_ABOVE_US
    ]
    aims += [Aim(f"watch, {w.case}", w.extra * 1e6, MOST_WATCHING_US, unit="us") for w in watching]
    aims += [Aim(f"engine, PP {e.stages}", e.tasks_per_s, 50_000, "at least", "tasks/s") for e in engine]
    return aims


def main() -> None:
    """Measure and print."""
    parser = parser_of("What dispatching costs.", json_file=True)
    arguments = parsed(parser)
    size = QUICK if arguments.quick else Size()

    load = OtherLoad()
    samples = arrivals.measure(size.rounds, size.messages, size.busy_messages)
    decisions = {(h, n): Spread.of(time_decisions(h, n, size.decisions)) for h in HINTS for n in READY}
    engine = [time_engine(stages, size.engine_microbatches, size.engine_repeats) for stages in ENGINE_STAGES]
    watching = [time_watch(case, size.watched_rounds, size.watched_microbatches) for case in CASES]
    collections = time_collections(size.collections)
    spreads, aims = arrivals.spreads_of(samples), aims_of(samples, engine, watching)
    document = {
        "decisions": [{"hint": h, "ready": n, **asdict(spread)} for (h, n), spread in decisions.items()],
        "arrivals": {name: asdict(spread) for name, spread in spreads.items()},
        "outputs": [asdict(cost) for cost in watching],
        "collections": asdict(collections),
        "engine": [asdict(speed) for speed in engine],
        "aims": [aim.to_json() for aim in aims],
        "other_load": load.share(),
    }

    def tables() -> None:
        print_tables(decisions, spreads, watching, engine, aims)
        print(f"a full garbage collection: {us(collections.plain)} us, after gc.freeze {us(collections.frozen)} us")
        print(load.sentence())

    report(arguments.json, document, tables, text_of)


def print_tables(
    decisions: Mapping[tuple[str, int], Spread],
    spreads: Mapping[str, Spread],
    watching: Sequence[WatchCost],
    engine: Sequence[EngineSpeed],
    aims: Sequence[Aim],
) -> None:
    """For people."""
    console = Console(width=max(Console().width, 110))
    table = table_of("us a decision, p50 (p99)", "hint", *(f"{n} ready" for n in READY))
    for hint in HINTS:
        own = [decisions[hint, n] for n in READY]
        table.add_row(hint, *(f"{us(spread.p50)} ({us(spread.p99)})" for spread in own))
    console.print(table)
    table = table_of("us from an arrival's sending, or that the lane was idle", "", "p50", "p90", "p99", "samples")
    for name, spread in spreads.items():
        table.add_row(name, us(spread.p50), us(spread.p90), us(spread.p99), str(spread.samples))
    console.print(table)
    table = table_of("us a task", "a stage's", "without the watch", "more with it")
    for cost in watching:
        table.add_row(str(cost.case), us(cost.without), us(cost.extra))
    console.print(table)
    table = table_of("engine", "stages x microbatches", "tasks/s")
    for speed in engine:
        table.add_row(f"{speed.stages} x {speed.microbatches}", f"{speed.tasks_per_s:,.0f}")
    console.print(table, aims_table(aims))


if __name__ == "__main__":
    main()
