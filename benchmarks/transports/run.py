"""Transports between two ranks of one host, side by side. Takes about five minutes.

    python benchmarks/transports/run.py [--rounds N] [--only tcp] [--quick] [--json]

Two processes exchange messages with one float32 tensor through RRFP's transports, as the runtime uses them: on uvloop,
with the default window. Beside them: torch.distributed's send and recv over gloo; a bare Unix socket of type SEQPACKET
with blocking calls, in datagrams of 64 KiB at most; the same socket read by a thread that hands each message to the
loop ("+ hop"); memcpy, which stays in one process. The two ends of inproc are two loops in one process. In each round
every way has its turn; ratios compare ways in the same round, and all figures are medians over the rounds. A round in
which other processes took over 10% of the machine is discarded, but the least disturbed third is always used.

latency: half of a round trip in which both messages have the same size, from the call of send to the return of receive;
by a transport's shortcuts where it offers them, as in the runtime. The received tensor is dropped unread. "busy": each
rank has a second thread that multiplies matrices, as a lane does. p99 is shown where there are 1000 samples.

throughput: messages one behind the other, from the first send to the acknowledgement of the last message; the
transport's window alone bounds those under way. "unread": the receiver drops each tensor at once, so a transport that
copies nothing there shows nothing of the receiver's first look at the memory. "read": a second thread sums each tensor
once, as a lane would use it, and the receiver holds three at most. Gloo and bare sockets receive into buffers that they
reuse.

CPU: processor time of both processes in those streams, all threads, summed. 1 GB is 10^9 bytes.

"CURVE over plain" compares zmq over tcp with a secret, authenticated and encrypted, with the same without; `--only tcp`
measures these two alone.

"shm ahead" compares shm with zmq over ipc in all latencies (p50), throughputs and CPU times of the tables.
`--quick` only shows that everything runs, without 128 MiB: its figures mean nothing.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.progress import Progress

from benchmarks.shared.figures import Aim, aims_table, quantile, table_of, us
from benchmarks.shared.load import OtherLoad
from benchmarks.shared.options import parsed, parser_of
from benchmarks.transports.aims import Results, aims_of, comparisons
from benchmarks.transports.encryption import encryption_costs
from benchmarks.transports.processes import RoundReport, run
from benchmarks.transports.rounds import DISTURBED, Round, Rounds
from benchmarks.transports.settings import LATENCY_WAYS, QUICK, STREAM_WAYS, TCP_WAYS, Kind, Settings, name_of

#: p99 needs so many samples.
P99_SAMPLES = 1000

GB = 1e9


def results_of(settings: Settings, rounds: Iterable[list[RoundReport]]) -> dict[tuple[int, Kind], Rounds]:
    """The reports by size and kind; those of the rounds that warm up are left out."""
    by_cell: dict[tuple[int, Kind], list[Round]] = defaultdict(list)
    for reports in rounds:
        block = reports[0].blocks[0].block
        if block.number >= 0:
            by_cell[block.size, block.kind].append(Round.of(reports))
    return {
        (size, kind): Rounds(size, kind, settings.counts[size].of(kind), measured)
        for (size, kind), measured in by_cell.items()
    }


@dataclass(frozen=True, slots=True)
class Latency:
    """One cell of the latency tables; p99 is None where there are too few samples."""

    way: str
    size: int
    lane: str
    p50: float
    p99: float | None
    samples: int


@dataclass(frozen=True, slots=True)
class Throughput:
    """One cell of the throughput tables; processor time is in seconds, of both processes."""

    way: str
    size: int
    received: str
    gb_per_s: float
    cpu_s_per_gb: float


def latencies(results: Results) -> list[Latency]:
    """All cells."""
    cells = []
    for (size, kind), rounds in results.items():
        for way in rounds.ways if kind.is_latency else ():
            samples = rounds.samples(way)
            p99 = quantile(samples, 0.99) if len(samples) >= P99_SAMPLES else None
            cells.append(Latency(way, size, kind, rounds.latency_s(way), p99, len(samples)))
    return cells


def throughputs(results: Results) -> list[Throughput]:
    """All cells."""
    return [
        Throughput(way, size, kind, rounds.rate(way) / GB, rounds.cpu(way) * GB)
        for (size, kind), rounds in results.items()
        if not kind.is_latency
        for way in rounds.ways
    ]


def print_tables(results: Results, aims: Sequence[Aim]) -> None:
    """For people."""
    console = Console(width=max(Console().width, 120))
    sizes = list(dict.fromkeys(size for size, _ in results))
    for title, ways, cells in _tables(results):
        table = table_of(title, "way", *map(name_of, sizes))
        for way in ways:
            if any((way, size) in cells for size in sizes):
                table.add_row(way, *(cells.get((way, size), "-") for size in sizes))
        console.print(table)
    lines = disturbances(results)
    if aims:
        console.print(aims_table(aims))
        behind = [f"{each.figure} ({each.ahead:.2f} times)" for each in comparisons(results) if each.ahead <= 1]
        lines.insert(0, f"shm is not ahead of zmq ipc in: {'; '.join(behind) or 'nothing'}")
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)


def _tables(results: Results) -> Iterator[tuple[str, Sequence[str], dict[tuple[str, int], str]]]:
    """Title, ways and cells of each."""
    all_latencies, all_throughputs = latencies(results), throughputs(results)
    for kind in Kind:
        if kind.is_latency:
            cells = {
                (each.way, each.size): us(each.p50) + ("" if each.p99 is None else f" ({us(each.p99)})")
                for each in all_latencies
                if each.lane == kind
            }
            yield f"latency, {kind} lane: us, p50 (p99)", LATENCY_WAYS, cells
            continue
        own = [each for each in all_throughputs if each.received == kind]
        cells = {(each.way, each.size): f"{each.gb_per_s:.3f}" for each in own}
        yield f"throughput, {kind}: GB/s", STREAM_WAYS, cells
        cells = {(each.way, each.size): f"{each.cpu_s_per_gb:.3f}" for each in own}
        yield f"CPU, {kind}: s a GB, both processes", STREAM_WAYS, cells
    costs = list(encryption_costs(results))
    figures = list(dict.fromkeys(each.figure for each in costs))
    yield "CURVE over plain tcp", figures, {(each.figure, each.size): f"{each.ratio:.2f}" for each in costs}


def disturbances(results: Results) -> list[str]:
    """By kind, how many rounds were discarded, for people."""
    lines = []
    for kind in Kind:
        cells = [rounds for (_, each), rounds in results.items() if each is kind]
        discarded = sum(rounds.discarded for rounds in cells)
        total = discarded + sum(len(rounds.kept) for rounds in cells)
        noisy = [name_of(rounds.size) for rounds in cells if rounds.others > DISTURBED]
        line = f"{kind}: {discarded} of {total} rounds discarded as disturbed"
        lines.append(line + (f"; disturbed ones had to be used at {', '.join(noisy)}" if noisy else ""))
    return lines


def main() -> None:
    """Measure and print."""
    parser = parser_of("RRFP's transports within one host, beside gloo, bare sockets and memcpy.")
    parser.add_argument("--rounds", type=int, default=Settings().rounds, help="measured rounds, at least 1")
    parser.add_argument("--only", choices=["tcp"], help="measure zmq over tcp alone, plain and with CURVE")
    arguments = parsed(parser, "rounds")
    only = TCP_WAYS if arguments.only else None
    settings = Settings(1, QUICK, warm_up=0, only=only) if arguments.quick else Settings(arguments.rounds, only=only)

    load = OtherLoad()
    with Progress(console=Console(stderr=True), transient=True, auto_refresh=False) as progress:
        rounds = progress.track(run(settings), total=sum(1 for _ in settings.plan()), description="rounds")
        results = results_of(settings, rounds)
    aims = [] if only else aims_of(results)
    if arguments.json:
        document = {
            "latency": [asdict(cell) for cell in latencies(results)],
            "throughput": [asdict(cell) for cell in throughputs(results)],
            "rounds": [
                {
                    "size": size,
                    "kind": kind,
                    "used": len(rounds.kept),
                    "discarded": rounds.discarded,
                    "others": rounds.others,
                }
                for (size, kind), rounds in results.items()
            ],
            "comparisons": [] if only else [asdict(each) for each in comparisons(results)],
            "encryption": [asdict(each) for each in encryption_costs(results)],
            "aims": [aim.to_json() for aim in aims],
            "other_load": load.share(),
        }
        print(json.dumps(document))
    else:
        print_tables(results, aims)
        print(load.sentence())


if __name__ == "__main__":
    main()
