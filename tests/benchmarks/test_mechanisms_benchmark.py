"""The benchmark of mechanisms compares what it says it compares, and its blocking 1F1B is the one that is simulated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fork_server import fork_server, printed, run

from benchmarks.mechanisms.coordination import TP, measured
from benchmarks.mechanisms.figures import engine_s, rows_of, simulated
from benchmarks.mechanisms.messages import MessageTimes, messages_of
from benchmarks.mechanisms.settings import (
    BF,
    BFW,
    BLOCKING,
    DEFAULT,
    LATE,
    LATE_BLOCKING,
    LATE_STRICT,
    MECHANISMS,
    METHODS,
    STRICT,
    WORST,
    Settings,
    paper_ratio,
)
from benchmarks.shared.comparison import Cell, Turn
from benchmarks.shared.steps import Step
from benchmarks.tp.settings import Settings as TpSettings

__all__ = ["fork_server"]

WORKER = Path(__file__).resolve().parents[2] / "benchmarks" / "mechanisms" / "worker.py"
RUN = WORKER.with_name("run.py")


def steps_of(settings: Settings) -> list[Step]:
    output = printed(WORKER, settings.to_json(), ranks=settings.stages, timeout_s=150)
    return [Step.of(json.loads(line), METHODS) for line in output.splitlines() if line.startswith("{")]


def test_blocking_stages_run_1f1b_and_wait_for_each_other(tmp_path: Path) -> None:
    methods = (BLOCKING, STRICT, LATE_STRICT, LATE_BLOCKING)
    settings = Settings(3, ("mllm",), ("J3",), methods, microbatches=5, rounds=1, folder=str(tmp_path))
    measured = {step.turn.method: step for step in steps_of(settings) if step.turn.number}
    assert measured[BLOCKING].order.orders == measured[STRICT].order.orders
    for row in rows_of(settings, list(measured.values())):  # which checks that each task ran once
        assert row.per_bound_interval == (row.per_bound, row.per_bound)
        assert row.per_bound >= row.simulated_per_bound
        assert row.ratio_interval == (row.ratio, row.ratio)
    seconds = {name: engine_s(settings, Turn(Cell(3, "mllm", "J3"), 1, name)) for name in methods}
    assert seconds[STRICT] <= seconds[BLOCKING] < seconds[LATE_STRICT] < seconds[LATE_BLOCKING]
    for name, step in measured.items():
        assert step.seconds >= seconds[name], name

    times = {each.method: each for each in messages_of(tmp_path, 3, lambda *turn: True)}
    assert set(times) == {BLOCKING, STRICT}
    assert times[STRICT].count == 2 * 2 * 5  # both ways over two edges
    assert list(messages_of(tmp_path, 3, lambda cell, number, method: False)) == []


def test_the_statistics_of_messages_are_the_papers() -> None:
    times = MessageTimes.of(STRICT, Cell(8, "llm", "J0"), [float(n) for n in range(1, 101)])
    assert (times.p50, times.outer, times.middle) == (51.0, 90 / 51, 50 / 51)


def test_the_paper_has_a_figure_for_the_pairs_that_it_measured() -> None:
    assert paper_ratio(BF, BLOCKING, "mllm") == pytest.approx(1 / 1.92, rel=0.01)
    assert paper_ratio(BFW, BF, "llm") == pytest.approx(2.10 / 2.29)
    assert paper_ratio(WORST, BF, "mllm") == pytest.approx(1.0492)
    assert paper_ratio(WORST, BF, "llm") is None
    assert paper_ratio(DEFAULT, BF, "mllm") is None


def test_every_mechanism_sets_two_known_methods_apart_and_every_method_serves_one() -> None:
    named = {name for pairs in MECHANISMS.values() for pair in pairs for name in pair}
    assert named == set(METHODS)


def test_the_engine_knows_every_pair_and_that_what_is_reported_late_costs_time() -> None:
    cell = Cell(4, "mllm", "J3")
    found = {(row.method, row.base): row.ratio for row in simulated([cell], draws=1)}
    assert len(found) == sum(map(len, MECHANISMS.values()))
    base, *late = LATE
    assert 1 <= found[late[0], base] < found[late[-1], base]
    assert found[LATE_STRICT, LATE_BLOCKING] < found[STRICT, BLOCKING] <= 1


@pytest.mark.long
@pytest.mark.timeout(180)
def test_every_method_runs(tmp_path: Path) -> None:
    settings = Settings(
        2, ("mllm", "llm"), ("J3", "J0"), tuple(METHODS), microbatches=4, rounds=1, folder=str(tmp_path)
    )
    rows = list(rows_of(settings, steps_of(settings)))
    assert [(row.cell.profile, row.cell.jitter) for row in rows[:: len(rows) // 2]] == [("mllm", "J3"), ("llm", "J0")]
    assert len(rows) == 2 * sum(map(len, MECHANISMS.values()))


@pytest.mark.long
@pytest.mark.timeout(180)
def test_groups_agree_in_real_processes_beside_the_engine() -> None:
    rows = list(measured(TpSettings(TP, 2, 4, 1, "mllm", "J3")))
    assert [row.method for row in rows] == ["leader, depth 2", "leader, depth 1", "agreement"]
    assert rows[0].ratio == rows[0].simulated == 1
    assert rows[2].ratio_interval == (rows[2].ratio, rows[2].ratio)
    assert [row.paper_share is None for row in rows] == [True, True, False]


@pytest.mark.long
@pytest.mark.timeout(180)
def test_groups_alone_leave_the_other_tables_of_a_file_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    file.write_text(json.dumps({"rows": [1], "tp": [2]}))
    [done] = run(RUN, "--quick", "--only-tp", "--json", str(file), timeout_s=150)
    assert done.code == 0, done.errors[-4000:]
    document = json.loads(file.read_text())
    assert document["rows"] == [1]
    cells = dict.fromkeys(row["cell"] for row in document["tp"])
    assert list(cells) == ["PP 2, mllm, J3", "PP 2, llm, J0"]
    assert [row["paper_share"] is None for row in document["tp"]] == [True, True, False, True, True, True]


def test_groups_alone_need_a_file_that_has_the_others(tmp_path: Path) -> None:
    [done] = run(RUN, "--only-tp", "--json", str(tmp_path / "none.json"))
    assert (done.code, "must be with --only-tp a file that this command has written" in done.errors) == (2, True)
