"""Sweeps: their rows are those of single runs, in order, over any number of processes."""

from __future__ import annotations

import csv
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from callbacks.test_files import largest_file

from rrfp import Hint, View
from rrfp.core.ready_set import ReadySet
from rrfp.costs import write_costs
from rrfp.errors import ConfigError, DeadlockError
from rrfp.lab.cluster.simulation import simulate_tensor_parallel
from rrfp.lab.simulation import simulate
from rrfp.lab.sweep import runs
from rrfp.lab.sweep.experiment import Experiment, SimulatedMethod
from rrfp.lab.sweep.pool import run_all
from rrfp.lab.sweep.runs import COLUMNS, Skip, SweepFile, SweepRow, sweep
from rrfp.lab.sweep.workloads import CostFile, Workload
from rrfp.model.tasks import Task

WORKLOAD = Workload(profile="mllm", stages=3, microbatches=6, split=True, jitter="J2", latency="wire", seed=4)
METHODS = (
    SimulatedMethod(hint="bfw", limit="1f1b"),
    SimulatedMethod(hint="bf", limit=2, admission="paper"),
    SimulatedMethod(strict="1f1b"),
)


def experiments() -> list[Experiment]:
    workloads = [replace(WORKLOAD, stages=n, seed=s, chunks=c) for n in (2, 4) for c in (1, 2) for s in (0, 1)]
    return [Experiment(workload, method) for workload in workloads for method in METHODS]


class Silent(Hint):
    """Only stage 0 ever runs anything."""

    may_wait = True

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        return next(iter(ready)) if view.stage == 0 else None


def test_a_row_says_what_the_single_run_says() -> None:
    result = sweep([Experiment(WORKLOAD, method) for method in METHODS], jobs=1)
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
    seen: list[SweepRow | Skip] = []
    alone = sweep(experiments(), jobs=1)
    several = sweep(experiments(), jobs=3, progress=seen.append)
    assert several == alone
    assert [outcome for outcome in seen if isinstance(outcome, SweepRow)] == list(alone.rows)
    assert [outcome for outcome in seen if isinstance(outcome, Skip)] == list(alone.skipped)
    assert len(seen) == len(experiments())


def test_what_does_not_fit_is_skipped_with_its_reason() -> None:
    result = sweep(experiments(), jobs=1)
    assert [skip.experiment for skip in result.skipped] == [
        one for one in experiments() if one.method.kind == "strict" and one.workload.chunks == 2
    ]
    assert all("schedule 1f1b takes 1 chunk a stage" in skip.reason for skip in result.skipped)
    assert len(result.rows) + len(result.skipped) == len(experiments())


def test_no_experiments_no_rows() -> None:
    assert sweep([]).rows == ()


def test_hints_receive_the_profiles_sizes() -> None:
    seen: set[tuple[float, ...] | None] = set()

    class Listening(Hint):
        def choose(self, ready: ReadySet, view: View) -> Task | None:
            seen.add(view.sizes)
            return next(iter(ready))

    Experiment(WORKLOAD, SimulatedMethod(hint=Listening)).simulate()
    assert seen == {tuple(WORKLOAD.sizes())}


def test_a_class_that_cannot_be_pickled_runs_beside_other_processes() -> None:
    class Local(Hint):
        def choose(self, ready: ReadySet, view: View) -> Task | None:
            return next(iter(ready))

    methods = (SimulatedMethod(hint=Local), SimulatedMethod(hint="bf"))
    several = sweep([Experiment(WORKLOAD, method) for method in methods], jobs=2)
    assert [row.method for row in several.rows] == ["Local", "bf"]


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_deadlock_ends_the_sweep_and_names_the_run(jobs: int) -> None:
    two = [Experiment(replace(WORKLOAD, seed=s), SimulatedMethod(hint=Silent, name="mine")) for s in (8, 9)]
    message = r"hint mine on profile=mllm, stages=3, .*seed=8: deadlock: every stage is idle"
    with pytest.raises(DeadlockError, match=message):
        sweep(two, jobs=jobs)


def test_groups_of_ranks_have_columns_of_their_own() -> None:
    groups, alone = replace(WORKLOAD, tp=2, latency="spike"), WORKLOAD
    methods = (SimulatedMethod(hint="bf", coordination="agreement"), SimulatedMethod(strict="1f1b"))
    rows = sweep([Experiment(groups, method) for method in methods] + [Experiment(alone, METHODS[0])], jobs=1).rows
    run = simulate_tensor_parallel(
        groups.costs(), 2, hint="bf", coordination="agreement", latency="spike", seed=4, sizes=groups.sizes()
    )
    first = rows[0]
    assert (first.makespan, first.ratio) == (run.simulation.makespan, run.simulation.ratio)
    assert first.coordination_share == run.result.coordination_share > 0
    assert first.failed_rounds_per_task == run.result.failed_rounds_per_task > 0
    assert first.messages_per_task == run.result.messages_per_task > 0
    assert [(row.tp, row.coordination) for row in rows] == [(2, "agreement"), (2, "independent"), (None, None)]
    assert rows[2].coordination_share is rows[2].failed_rounds_per_task is rows[2].messages_per_task is None


def test_rules_that_groups_cannot_follow_are_skipped_with_the_reason() -> None:
    methods = (SimulatedMethod(hint="bf", admission="paper"), SimulatedMethod(strict="1f1b", sends="blocking"))
    result = sweep([Experiment(replace(WORKLOAD, tp=2), method) for method in methods], jobs=1)
    assert [skip.reason for skip in result.skipped] == [
        "admission is 'paper', must be staircase with tp",
        "sends is 'blocking', must be eager with tp",
    ]
    alone = sweep([Experiment(WORKLOAD, SimulatedMethod(hint="bf", coordination="leader"))], jobs=1)
    assert alone.skipped[0].reason == "coordination is 'leader', must be None without tp"


def test_a_cost_file_is_a_workload_without_profile_and_seed(tmp_path: Path) -> None:
    path = str(tmp_path / "costs.json")
    write_costs(path, WORKLOAD.costs())
    of_file, of_profile = sweep(
        [Experiment(CostFile(costs_file=path), METHODS[0]), Experiment(WORKLOAD, METHODS[0])], jobs=1
    ).rows
    own = {"costs": path, "profile": None, "jitter": None, "latency": None, "seed": None}
    assert asdict(of_file) == {**asdict(of_profile), **own}
    assert str(Experiment(CostFile(costs_file=path, tp=2), METHODS[0])).endswith(f"on costs_file={path}, tp=2")


def test_wrong_jobs_are_refused() -> None:
    with pytest.raises(ConfigError, match="jobs is 0, must be a whole number >= 1"):
        sweep(experiments(), jobs=0)


def test_few_tasks_are_not_worth_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []

    def run_here(run: object, items: list[Experiment], *, jobs: int) -> object:
        used.append(jobs)
        return run_all(run, items, jobs=1)  # type: ignore[arg-type]

    monkeypatch.setattr(runs, "run_all", run_here)
    monkeypatch.setattr(runs, "usable_cores", lambda: 64)
    sweep([Experiment(WORKLOAD, METHODS[0])])
    monkeypatch.setattr(runs, "TASKS_WORTH_A_PROCESS", WORKLOAD.num_tasks)
    sweep([Experiment(WORKLOAD, METHODS[0])] * 3)
    assert used == [1, 1 + 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"profile": "gpt"}, "profile is 'gpt', must be one of: llm, mllm, modalities, video"),
        ({"stages": 0}, "stages is 0, must be a whole number >= 1"),
        ({"microbatches": 1.5}, "microbatches is 1.5, must be a whole number >= 1"),
        ({"chunks": 0}, "chunks is 0, must be a whole number >= 1"),
        ({"placement": "ring"}, "placement is 'ring', must be one of: looped, v"),
        ({"jitter": "J4"}, "jitter is 'J4', must be one of: J0, J1, J2, J3"),
        ({"latency": "slow"}, "latency is 'slow', must be one of: none, constant"),
        ({"seed": -1}, "seed is -1, must be a whole number >= 0"),
        ({"tp": 0}, "tp is 0, must be a whole number >= 1"),
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
        ({"hint": "bf", "coordination": "vote"}, "coordination is 'vote', must be one of: leader, agreement"),
    ],
)
def test_a_method_refuses_what_no_workload_could_run(values: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SimulatedMethod(**values)  # type: ignore[arg-type]


@pytest.fixture
def rows() -> tuple[SweepRow, ...]:
    return sweep([Experiment(WORKLOAD, method) for method in METHODS], jobs=1).rows


def test_a_csv_file_reads_back_bitwise(rows: tuple[SweepRow, ...], tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    with SweepFile(path) as file:
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


def test_a_csv_file_is_complete_after_every_row(rows: tuple[SweepRow, ...], tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    with SweepFile(path) as file:
        for count, row in enumerate(rows[:2], 1):
            file.add(row)
            head, *lines = path.read_text().splitlines()
            assert (head, len(lines)) == (",".join(COLUMNS), count)


def test_the_first_row_replaces_an_older_file_and_without_one_nothing_changes(
    rows: tuple[SweepRow, ...], tmp_path: Path
) -> None:
    old, new = tmp_path / "old.csv", tmp_path / "new.csv"
    old.write_text("precious\n")
    for path in (old, new):
        with SweepFile(path):
            pass
    assert (old.read_text(), new.exists()) == ("precious\n", False)
    with SweepFile(old) as file:
        file.add(rows[0])
    assert old.read_text().startswith(f"{','.join(COLUMNS)}\n")


def test_a_csv_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent/rows\.csv: cannot be written \(No such file"):
        SweepFile(tmp_path / "absent" / "rows.csv")


def test_a_cost_file_that_changed_is_read_again(tmp_path: Path) -> None:
    path = str(tmp_path / "costs.json")
    digests = []
    for seed in (1, 2):
        write_costs(path, replace(WORKLOAD, seed=seed).costs())
        digests.append(CostFile(costs_file=path).costs().digest())
    assert digests == [replace(WORKLOAD, seed=seed).costs().digest() for seed in (1, 2)]


def test_a_full_disk_leaves_whole_rows_or_no_file(rows: tuple[SweepRow, ...], tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    full = pytest.raises(ConfigError, match=r"rows\.csv: cannot be written \(File too large\)$")
    with largest_file(10), SweepFile(path) as file, full:
        file.add(rows[0])
    assert not path.exists()
    with SweepFile(path) as file:
        file.add(rows[0])
        whole = path.read_bytes()
        with largest_file(len(whole) + 10), pytest.raises(ConfigError, match="cannot be written"):
            file.add(rows[1])
    assert path.read_bytes() == whole
