"""Sweeps: their rows are those of single runs, in order, over any number of processes, whatever happens to these."""

from __future__ import annotations

import csv
import os
import signal
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from rrfp.core.hint import Hint, View
from rrfp.core.ready_set import ReadySet
from rrfp.core.tasks import Task
from rrfp.errors import ConfigError, DeadlockError, LocalError
from rrfp.sim.simulation import simulate
from rrfp.sim.sweep.experiment import Cell, Method, Workload
from rrfp.sim.sweep.runs import COLUMNS, Row, RowFile, Skip, sweep
from rrfp.sim.sweep.workers import WorkerLostError, in_order

WORKLOAD = Workload(profile="mllm", stages=3, microbatches=6, split=True, jitter="J2", latency="wire", seed=4)
METHODS = (Method(hint="bfw", limit="1f1b"), Method(hint="bf", limit=2, admission="paper"), Method(strict="1f1b"))


def cells() -> list[Cell]:
    workloads = [replace(WORKLOAD, stages=n, seed=s, chunks=c) for n in (2, 4) for c in (1, 2) for s in (0, 1)]
    return [Cell(workload, method) for workload in workloads for method in METHODS]


class Silent(Hint):
    """Only stage 0 ever runs anything."""

    may_wait = True

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        return next(iter(ready)) if view.stage == 0 else None


def test_a_row_says_what_the_single_run_says() -> None:
    result = sweep([Cell(WORKLOAD, method) for method in METHODS], jobs=1)
    costs = WORKLOAD.costs()
    for row, answer in zip(
        result.rows,
        (
            simulate(costs, hint="bfw", limit="1f1b"),
            simulate(costs, hint="bf", limit=2),
            simulate(costs, strict="1f1b"),
        ),
        strict=True,
    ):
        expected = answer.to_json()
        assert (row.makespan, row.lower_bound, row.ratio) == (answer.makespan, answer.lower_bound, answer.ratio)
        assert (row.peak_max, row.received_peak_max) == (max(expected["peak"]), max(expected["received_peak"]))
        assert row.busy_share == pytest.approx(sum(expected["busy"]) / (3 * answer.makespan))
        assert (row.digest, row.seed, row.jitter, row.split) == (costs.digest(), 4, "J2", True)
    assert [(row.method, row.kind, row.limit, row.admission, row.sends) for row in result.rows] == [
        ("bfw", "hint", "1f1b", "staircase", "eager"),
        ("bf", "hint", "2", "paper", "eager"),
        ("1f1b", "strict", None, None, "eager"),
    ]


def test_processes_change_nothing_and_outcomes_come_in_order() -> None:
    seen: list[Row | Skip] = []
    alone = sweep(cells(), jobs=1)
    several = sweep(cells(), jobs=3, progress=seen.append)
    assert several == alone
    assert [outcome for outcome in seen if isinstance(outcome, Row)] == list(alone.rows)
    assert [outcome for outcome in seen if isinstance(outcome, Skip)] == list(alone.skipped)
    assert len(seen) == len(cells())


def test_what_does_not_fit_is_skipped_with_its_reason() -> None:
    result = sweep(cells(), jobs=1)
    assert [skip.cell for skip in result.skipped] == [
        cell for cell in cells() if cell.method.kind == "strict" and cell.workload.chunks == 2
    ]
    assert all("schedule 1f1b takes 1 chunk a stage" in skip.reason for skip in result.skipped)
    assert len(result.rows) + len(result.skipped) == len(cells())


def test_no_cells_no_rows() -> None:
    assert sweep([]).rows == ()


def test_hints_are_told_the_profiles_sizes() -> None:
    told: set[tuple[float, ...] | None] = set()

    class Listening(Hint):
        def choose(self, ready: ReadySet, view: View) -> Task | None:
            told.add(view.sizes)
            return next(iter(ready))

    Cell(WORKLOAD, Method(hint=Listening)).simulate()
    assert told == {tuple(WORKLOAD.sizes())}


def test_a_class_that_cannot_be_pickled_runs_in_other_processes() -> None:
    class Local(Hint):
        def choose(self, ready: ReadySet, view: View) -> Task | None:
            return next(iter(ready))

    result = sweep([Cell(replace(WORKLOAD, seed=s), Method(hint=Local)) for s in range(3)], jobs=2)
    assert [row.method for row in result.rows] == ["Local"] * 3


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_deadlock_ends_the_sweep_and_names_the_run(jobs: int) -> None:
    two = [Cell(replace(WORKLOAD, seed=s), Method(hint=Silent, name="mine")) for s in (8, 9)]
    message = r"mine \(hint\) on profile=mllm, stages=3, .*seed=8: deadlock: every stage is idle"
    with pytest.raises(DeadlockError, match=message):
        sweep(two, jobs=jobs)


def test_an_error_in_a_hint_comes_with_the_workers_traceback() -> None:
    class Broken(Hint):
        def choose(self, ready: ReadySet, view: View) -> Task | None:
            raise KeyError("no such thing")

    with pytest.raises(KeyError, match="no such thing") as caught:
        sweep([Cell(replace(WORKLOAD, seed=s), Method(hint=Broken)) for s in (0, 1)], jobs=2)
    assert "in choose" in "".join(caught.value.__notes__)


def test_the_first_error_in_order_is_raised_after_everything_before_it() -> None:
    """Whichever worker is faster: place 0 takes much longer than the two that fail."""

    def work(place: int) -> int:
        if place:
            raise KeyError(place)
        return 0 * sum(range(3_000_000))

    answers = in_order(work, 3, jobs=3)
    assert next(answers) == 0
    with pytest.raises(KeyError, match="1"):
        next(answers)


def test_an_error_that_cannot_be_pickled_comes_as_a_local_error() -> None:
    class Odd(Exception):
        pass

    def work(place: int) -> int:
        raise Odd(f"place {place}")

    with pytest.raises(LocalError, match="Odd: place 0"):
        list(in_order(work, 2, jobs=2))


def test_a_killed_worker_is_an_error_not_a_hang() -> None:
    def work(place: int) -> int:
        if place == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return place

    with pytest.raises(WorkerLostError, match=r"ended by itself \(exit code -9\)"):
        list(in_order(work, 3, jobs=2))


def test_answers_come_in_order_however_long_each_takes() -> None:
    def work(place: int) -> int:
        return place + 0 * sum(range((30 - place) * 20_000))

    assert list(in_order(work, 30, jobs=4)) == list(range(30))


def test_closing_early_leaves_no_process() -> None:
    """The guard of every test looks for processes that are left behind."""
    read, write = os.pipe()

    def work(place: int) -> int:
        if place:
            os.read(read, 1)  # for ever
        return place

    with closing(in_order(work, 3, jobs=3)) as answers:
        assert next(answers) == 0
    os.close(read)
    os.close(write)


def test_wrong_jobs_are_refused() -> None:
    with pytest.raises(ConfigError, match="jobs is 0, must be a whole number >= 1"):
        sweep(cells(), jobs=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"profile": "gpt"}, "profile is 'gpt', must be one of llm, mllm"),
        ({"stages": 0}, "stages is 0, must be a whole number >= 1"),
        ({"microbatches": 1.5}, "microbatches is 1.5, must be a whole number >= 1"),
        ({"chunks": 0}, "chunks is 0, must be a whole number >= 1"),
        ({"placement": "ring"}, "placement is 'ring', must be one of looped, v"),
        ({"jitter": "J4"}, "jitter is 'J4', must be one of J0, J1, J2, J3"),
        ({"latency": "slow"}, "latency is 'slow', must be one of none, constant"),
        ({"seed": -1}, "seed is -1, must be a whole number >= 0"),
    ],
)
def test_a_workload_refuses_what_no_table_could_be_made_of(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(WORKLOAD, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "exactly one of hint and strict is needed"),
        ({"hint": "bf", "strict": "1f1b"}, "exactly one of hint and strict is needed"),
        ({"hint": "nope"}, "hint is 'nope', must be one of: bf"),
        ({"strict": "bf"}, "strict is 'bf', must be one of: gpipe, 1f1b"),
        ({"hint": "bf", "limit": "lots"}, "limit is 'lots', must be a number of microbatches or one of: 1f1b, n, 2n"),
        ({"hint": "bf", "admission": "none"}, "admission is 'none', must be one of: staircase, paper"),
        ({"strict": "1f1b", "sends": "late"}, "sends is 'late', must be one of: eager, blocking"),
    ],
)
def test_a_method_refuses_what_no_workload_could_run(values: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Method(**values)  # type: ignore[arg-type]


@pytest.fixture
def rows() -> tuple[Row, ...]:
    return sweep([Cell(WORKLOAD, method) for method in METHODS], jobs=1).rows


def test_a_csv_file_reads_back_bitwise(rows: tuple[Row, ...], tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    with RowFile(path) as file:
        for row in rows:
            file.add(row)
    with path.open(newline="") as text:
        read = list(csv.DictReader(text))
    assert tuple(read[0]) == COLUMNS
    for found, row in zip(read, rows, strict=True):
        for name, value in asdict(row).items():
            if isinstance(value, float):
                assert float(found[name]) == value
            elif isinstance(value, bool):
                assert found[name] == ("true" if value else "false")
            else:
                assert found[name] == ("" if value is None else str(value))


def test_a_csv_file_is_complete_after_every_row(rows: tuple[Row, ...], tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    with RowFile(path) as file:
        assert path.read_text() == ",".join(COLUMNS) + "\n"
        file.add(rows[0])
        assert path.read_text().count("\n") == 2


def test_a_csv_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent/rows\.csv: cannot be written \(No such file"):
        RowFile(tmp_path / "absent" / "rows.csv")
