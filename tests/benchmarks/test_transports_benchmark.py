"""The transports benchmark: its verdicts on known figures, the rounds that it discards, and a smoke run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks.transports.aims import Results, aims_of, comparisons
from benchmarks.transports.encryption import encryption_costs
from benchmarks.transports.rounds import Measured, Round, Rounds
from benchmarks.transports.run import latencies, print_tables, throughputs
from benchmarks.transports.settings import (
    FULL,
    MEMCPY,
    QUICK,
    SHM,
    SOCKET_HOP,
    STREAM_WAYS,
    ZMQ_CURVE,
    ZMQ_IPC,
    Counts,
    Kind,
)

ROOT = Path(__file__).resolve().parents[2]


def results(seconds: Mapping[str, float], rounds: int = 3, counts_by_size: Mapping[int, Counts] = FULL) -> Results:
    """Messages and blocks of every way take 1 ms, also of processor time, but for ``seconds`` by way."""
    return {
        (size, kind): Rounds(
            size,
            kind,
            counts.of(kind),
            [
                Round(
                    {way: Measured([seconds.get(way, 1e-3)] * 4, seconds.get(way, 1e-3)) for way in kind.ways(size)},
                    0.0,
                )
                for _ in range(rounds)
            ],
        )
        for size, counts in counts_by_size.items()
        for kind in Kind
    }


def test_every_aim_is_met_by_a_shm_that_is_five_times_faster_than_zmq() -> None:
    figures = results({SHM: 2e-4, MEMCPY: 1.5e-4})

    aims = aims_of(figures)

    assert [(aim.name, aim.met) for aim in aims] == [(aim.name, True) for aim in aims]
    by_name = {aim.name: aim.value for aim in aims}
    assert by_name["shm's throughput over memcpy's, 32 MiB"] == pytest.approx(75)
    assert by_name[f"shm's latency above {SOCKET_HOP}, 4 KiB"] == pytest.approx(-800)
    assert [value for name, value in by_name.items() if "CPU" in name] == pytest.approx([20, 20, 20])
    assert [each.ahead for each in comparisons(figures)] == pytest.approx([5] * 6 * (2 + 2 * 2))


def test_no_aim_is_met_by_a_shm_that_is_as_fast_as_zmq() -> None:
    figures = results({MEMCPY: 5e-4, SOCKET_HOP: 9e-4})

    aims = aims_of(figures)

    assert [(aim.name, aim.met) for aim in aims] == [(aim.name, False) for aim in aims]
    assert aims[-1].value == len(comparisons(figures)) == 36


def test_encryption_is_compared_in_every_figure_but_those_of_a_read_stream() -> None:
    costs = list(encryption_costs(results({ZMQ_CURVE: 3e-3})))

    assert [each.ratio for each in costs] == pytest.approx([3.0] * (6 * 4))
    assert {each.figure for each in costs} == {
        "one way, idle lane",
        "one way, busy lane",
        "stream, unread",
        "CPU, unread",
    }


def test_disturbed_rounds_are_discarded_but_a_third_is_kept() -> None:
    def measured(*others: float) -> Rounds:
        return Rounds(4096, Kind.IDLE, 1, [Round({SHM: Measured([share], 0.0)}, share) for share in others])

    some, all_of_them = measured(0.05, 0.9, 0.1, 0.11), measured(0.5, 0.9, 0.3, 0.4)

    assert (some.samples(SHM), some.discarded, some.others) == ([0.05, 0.1], 2, 0.1)
    assert (all_of_them.samples(SHM), all_of_them.discarded, all_of_them.others) == ([0.3, 0.4], 2, 0.4)


def test_ratios_compare_ways_in_the_same_round() -> None:
    slow_first = [(8.0, 2.0), (1.0, 0.5), (1.0, 0.5)]
    rounds = [Round({ZMQ_IPC: Measured([zmq], zmq), SHM: Measured([shm], shm)}, 0.0) for zmq, shm in slow_first]

    joined = Rounds(4096, Kind.IDLE, 1, rounds)

    assert joined.faster(SHM, ZMQ_IPC) == 2
    assert joined.cpu_ratio(SHM, ZMQ_IPC) == 0.5
    assert joined.later_s(SHM, ZMQ_IPC) == -0.5


def test_tables_have_a_cell_for_every_way_and_size_and_p99_where_there_are_samples(
    capsys: pytest.CaptureFixture[str],
) -> None:
    figures = results({SHM: 2e-3}, rounds=250)

    print_tables(figures, aims_of(figures))

    text = capsys.readouterr().out
    assert text.count("2,000 (2,000)") == 12  # shm's latencies; 250 rounds have 1000 samples
    for way in (*STREAM_WAYS, SOCKET_HOP):
        rows = re.findall(rf"│ {re.escape(way)} +│", text)
        assert len(rows) == {SOCKET_HOP: 2, MEMCPY: 4}.get(way, 6)  # of two tables and four
    for aim in aims_of(figures):
        assert aim.name in text
    assert "shm is not ahead of zmq ipc in: 4 KiB, latency, idle (0.50 times)" in text
    for kind in Kind:
        assert f"{kind}: 0 of 1500 rounds discarded as disturbed" in text


@pytest.mark.long
@pytest.mark.timeout(180)
def test_smoke_run_measures_every_way_at_its_sizes() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "transports" / "run.py"), "--quick", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-4000:]

    document = json.loads(done.stdout)

    expected = results({}, counts_by_size=QUICK)
    assert [(c["way"], c["size"], c["lane"]) for c in document["latency"]] == [
        (cell.way, cell.size, cell.lane) for cell in latencies(expected)
    ]
    assert [(c["way"], c["size"], c["received"]) for c in document["throughput"]] == [
        (cell.way, cell.size, cell.received) for cell in throughputs(expected)
    ]
    assert all(cell["p50"] > 0 and cell["p99"] is None and cell["samples"] > 0 for cell in document["latency"])
    assert all(cell["gb_per_s"] > 0 and cell["cpu_s_per_gb"] > 0 for cell in document["throughput"])
    assert [(rounds["used"], rounds["discarded"]) for rounds in document["rounds"]] == [(1, 0)] * 4 * len(QUICK)
    assert [aim["name"] for aim in document["aims"]] == [aim.name for aim in aims_of(expected)]
    behind = [each["figure"] for each in document["comparisons"] if each["ahead"] <= 1]
    assert document["aims"][-1]["value"] == len(behind)
    assert [(each["figure"], each["size"]) for each in document["encryption"]] == [
        (each.figure, each.size) for each in encryption_costs(expected)
    ]
    assert all(each["ratio"] > 0 for each in document["encryption"])
    assert document["other_load"] is None or document["other_load"] >= 0
