"""`rrfp simulate`: its JSON and exit codes are interfaces that other programs rely on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli.shell import rrfp, rrfp_process

from rrfp.costs import CostTable, make_costs, write_costs
from rrfp.lab.cluster.simulation import simulate_tensor_parallel
from rrfp.model.graph import TaskGraph
from rrfp.schedules.csv import to_csv
from rrfp.schedules.registry import make_schedule

KEYS = ["makespan", "lower_bound", "ratio", "busy", "peak", "received_peak", "limit", "order", "start"]
#: Every hint but the schedules that need a split backward or two chunks.
HINTS = (
    *("bf", "fb", "b-priority", "f-priority", "bfw", "slot-aware", "slot-aware-pyramid", "bfw-pyramid"),
    *("gpipe", "1f1b", "interleaved-1f1b"),
)

SILENT_HINT = """
from rrfp import Hint

class Silent(Hint):
    may_wait = True

    def choose(self, ready, view):
        return next(iter(ready)) if view.stage == 0 else None
"""


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    path = tmp_path / "costs.json"
    write_costs(path, make_costs("mllm", 3, 8, jitter="J2", latency="wire"))
    return path


@pytest.fixture
def hint_file(tmp_path: Path) -> Path:
    path = tmp_path / "my_hints.py"
    path.write_text(SILENT_HINT)
    return path


@pytest.mark.parametrize(
    "method",
    [("--hint", name) for name in HINTS]
    + [("--hint", "bf", "--limit", limit) for limit in ("1", "1f1b", "n", "2n")]
    + [("--strict", name) for name in ("gpipe", "1f1b", "interleaved-1f1b")],
    ids=" ".join,
)
def test_json_has_every_key(costs: Path, method: tuple[str, ...]) -> None:
    result = rrfp("simulate", "--costs", costs, *method, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    answer = json.loads(result.stdout)
    assert list(answer) == KEYS
    assert answer["ratio"] == answer["makespan"] / answer["lower_bound"] >= 1
    assert [len(stage) for stage in answer["order"]] == [len(stage) for stage in answer["start"]] == [16] * 3
    assert [len(answer[key]) for key in ("busy", "peak", "received_peak")] == [3] * 3
    assert answer["limit"] is None if method[0] == "--strict" else len(answer["limit"]) == 3


def test_same_file_same_bytes(costs: Path) -> None:
    first = rrfp_process("simulate", "--costs", costs, "--hint", "bf", "--json", hash_seed=1)
    second = rrfp_process("simulate", "--costs", costs, "--hint", "bf", "--json", hash_seed=2)
    assert first.returncode == 0
    assert first.stdout == second.stdout
    assert first.stdout.count("\n") == 1


def test_default_limit_is_2n(costs: Path) -> None:
    plain = rrfp("simulate", "--costs", costs, "--hint", "bf", "--json").stdout
    assert plain == rrfp("simulate", "--costs", costs, "--hint", "bf", "--limit", "2n", "--json").stdout
    assert json.loads(plain)["limit"] == [6, 6, 6]


def test_limit_n_is_n_on_every_stage(costs: Path) -> None:
    answer = json.loads(rrfp("simulate", "--costs", costs, "--hint", "bf", "--limit", "n", "--json").stdout)
    assert answer["limit"] == [3, 3, 3]
    assert max(answer["peak"]) == 3


def test_table_shows_every_stage(costs: Path) -> None:
    result = rrfp("simulate", "--costs", costs, "--strict", "1f1b")
    assert result.exit_code == 0
    for text in ("strict 1f1b: 3 stages, 8 microbatches", "received peak", "makespan", "lower bound", "ratio"):
        assert text in result.stdout


@pytest.mark.parametrize(("schedule", "chunks", "placement"), [("zb-h1", 1, "looped"), ("zb-v", 2, "v")])
@pytest.mark.parametrize("way", ["--hint", "--strict"])
def test_zero_bubble_schedules_run_on_split_costs(
    tmp_path: Path, way: str, schedule: str, chunks: int, placement: str
) -> None:
    path = tmp_path / "costs.json"
    write_costs(path, make_costs("llm", 3, 8, chunks=chunks, placement=placement, split=True))  # type: ignore[arg-type]
    answer = json.loads(rrfp("simulate", "--costs", path, way, schedule, "--json").stdout)
    assert list(answer) == KEYS
    assert [len(stage) for stage in answer["order"]] == [3 * chunks * 8] * 3
    if way == "--strict":
        assert max(answer["peak"]) == 3 * chunks


@pytest.mark.parametrize(("chunks", "placement"), [(1, "looped"), (2, "looped"), (2, "v")])
def test_split_costs_and_chunks(tmp_path: Path, chunks: int, placement: str) -> None:
    path = tmp_path / "costs.json"
    write_costs(path, make_costs("mllm", 3, 6, chunks=chunks, placement=placement, split=True))  # type: ignore[arg-type]
    for limit in ("1", "1f1b", "2n"):
        result = rrfp("simulate", "--costs", path, "--hint", "bfw", "--limit", limit, "--json")
        assert result.exit_code == 0
        assert result.stderr.startswith("warning: with several chunks --limit 1f1b") == (limit == "1f1b" and chunks > 1)
        answer = json.loads(result.stdout)
        assert all(peak <= k * chunks for peak, k in zip(answer["peak"], answer["limit"], strict=True))
        assert "W5@" in " ".join(answer["order"][0])


def test_timeline_and_trace_are_written(costs: Path, tmp_path: Path) -> None:
    picture, trace = tmp_path / "t.png", tmp_path / "t.json"
    result = rrfp("simulate", "--costs", costs, "--hint", "bf", "--timeline", picture, "--trace", trace)
    assert result.exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads(trace.read_text())["traceEvents"]


def test_deadlock_prints_its_report_and_exits_3(costs: Path, hint_file: Path) -> None:
    result = rrfp_process("simulate", "--costs", costs, "--hint", "my_hints:Silent", "--json", cwd=hint_file.parent)
    assert (result.returncode, result.stdout) == (3, "")
    assert result.stderr.splitlines() == [
        "rrfp: deadlock: every stage is idle and nothing is in flight",
        "  stage 0 waits for: B0@0 (B0@1 owed by stage 1)",
        "  stage 1 waits for: F0@1 (ready, but hint Silent does not choose it)",
        "  stage 2 waits for: F0@2 (F0@1 owed by stage 1)",
    ]


def test_hint_from_a_file(costs: Path, hint_file: Path) -> None:
    assert rrfp("simulate", "--costs", costs, "--hint", f"{hint_file}:Silent").exit_code == 3


SIZED_HINT = """
from rrfp import Hint

class LargestFirst(Hint):
    def microbatch_order(self, view):
        return sorted(range(view.microbatches), key=lambda m: -view.sizes[m])

    def choose(self, ready, view):
        return next(iter(ready))
"""


@pytest.mark.parametrize("sizes", ["planned", "file"])
def test_a_hint_is_told_the_sizes(tmp_path: Path, sizes: str) -> None:
    table = make_costs("mllm", 3, 4, seed=3)
    write_costs(tmp_path / "costs.json", table)
    (tmp_path / "sized.py").write_text(SIZED_HINT)
    total = (table.forward + table.backward).sum(axis=0).tolist()
    (tmp_path / "sizes.json").write_text(json.dumps(total))
    sent = "planned" if sizes == "planned" else tmp_path / "sizes.json"
    hint = f"{tmp_path / 'sized.py'}:LargestFirst"
    result = rrfp("simulate", "--costs", tmp_path / "costs.json", "--hint", hint, "--sizes", sent, "--json")
    order = json.loads(result.stdout)["order"][0]
    largest_first = sorted(range(4), key=lambda m: -total[m])
    assert [task for task in order if task[0] == "F"] == [f"F{m}@0" for m in largest_first]


def test_blocking_sends_are_never_faster(costs: Path) -> None:
    eager, blocking = (
        json.loads(rrfp("simulate", "--costs", costs, "--strict", "1f1b", "--sends", sends, "--json").stdout)
        for sends in ("eager", "blocking")
    )
    assert list(blocking) == KEYS
    assert blocking["makespan"] > eager["makespan"]
    assert (blocking["order"], blocking["peak"]) == (eager["order"], eager["peak"])
    assert blocking["lower_bound"] == eager["lower_bound"]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_schedule_file_runs_as_the_schedule_that_it_holds(tmp_path: Path, schedule: str) -> None:
    """`rrfp.schedules.csv.to_csv` writes what torch's own schedules write."""
    costs, graph = tmp_path / "costs.json", TaskGraph.chain(3, split=True)
    write_costs(costs, make_costs("mllm", 3, 8, split=True, latency="spike"))
    (tmp_path / "mine.csv").write_text(to_csv(make_schedule(schedule, graph, 8), graph))
    of_file = rrfp("simulate", "--costs", costs, "--strict", tmp_path / "mine.csv", "--json")
    assert (of_file.exit_code, of_file.stderr) == (0, "")
    assert of_file.stdout == rrfp("simulate", "--costs", costs, "--strict", schedule, "--json").stdout


@pytest.mark.parametrize("unit", [1e-4, 1.0, 1e5])
def test_busy_times_have_the_same_decimals_and_the_longest_five_digits_or_more(tmp_path: Path, unit: float) -> None:
    rows: Any = [[factor * unit] for factor in (0.015343512345, 0.0318531, 2.0, 31.25)]
    messages: Any = [[0.0]] * 3
    table = CostTable(4, 1, "looped", 1, rows, rows, None, messages, messages)
    write_costs(tmp_path / "costs.json", table)
    lines = rrfp("simulate", "--costs", tmp_path / "costs.json", "--hint", "bf").stdout.splitlines()
    busy = [line.split()[1] for line in lines[2:6]]
    assert len({len(text.partition(".")[2]) for text in busy}) == 1
    assert sum(character.isdigit() for character in busy[3].lstrip("0.")) >= 5
    assert [float(text) for text in busy] == pytest.approx([2 * row[0] for row in rows], abs=1e-3 * unit)


def test_a_table_of_many_stages_shows_the_ends_and_the_mean(tmp_path: Path) -> None:
    write_costs(tmp_path / "costs.json", make_costs("mllm", 40, 4))
    lines = rrfp("simulate", "--costs", tmp_path / "costs.json", "--hint", "bf").stdout.splitlines()
    first_cells = [line.split("  ")[0] for line in lines[2:-1] if not line.startswith("-")]
    assert first_cells == [*map(str, range(8)), "... 24 more", *map(str, range(32, 40)), "mean"]


@pytest.mark.parametrize("coordination", [None, "leader", "agreement"])
def test_groups_of_ranks_have_the_files_own_latencies_shuffled(costs: Path, coordination: str | None) -> None:
    way = () if coordination is None else ("--coordination", coordination)
    result = rrfp("simulate", "--costs", costs, "--hint", "bf", "--limit", "n", "--tp", "3", *way, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    name: Any = coordination or "leader"
    table = make_costs("mllm", 3, 8, jitter="J2", latency="wire")
    run = simulate_tensor_parallel(table, 3, hint="bf", limit="n", coordination=name)
    assert result.stdout == json.dumps(run.to_json()) + "\n"
    answer = json.loads(result.stdout)
    assert list(answer) == [*KEYS, "tp"]
    assert answer["tp"]["ranks"] == 3
    assert answer["tp"]["coordination_share"] > 0


def test_one_rank_runs_as_without_groups(costs: Path) -> None:
    alone, group = (
        json.loads(rrfp("simulate", "--costs", costs, "--hint", "bf", *tp, "--json").stdout)
        for tp in ((), ("--tp", "1"))
    )
    assert group["tp"]["messages_per_task"] == 0
    assert {key: group[key] for key in KEYS} == alone


def test_a_strict_schedule_needs_no_coordination(costs: Path) -> None:
    groups = json.loads(rrfp("simulate", "--costs", costs, "--strict", "1f1b", "--tp", "4", "--json").stdout)["tp"]
    assert (groups["coordination"], groups["messages_per_task"], groups["coordination_share"]) == ("independent", 0, 0)


def test_the_text_shows_the_cost_of_coordination(costs: Path) -> None:
    write_costs(costs, make_costs("mllm", 3, 8, latency="spike"))  # so that ranks disagree
    options = ("simulate", "--costs", costs, "--hint", "bf", "--tp", "4", "--coordination", "agreement")
    lines = rrfp(*options).stdout.splitlines()
    assert lines[0] == "bf: 3 stages, 8 microbatches"
    tp = json.loads(rrfp(*options, "--json").stdout)["tp"]
    assert tp["failed_rounds_per_task"] > 0
    assert lines[-1] == (
        f"4 ranks a stage, agreement: coordination {tp['coordination_share']:.2%} of the step, "
        f"{tp['failed_rounds_per_task']:.3g} failed rounds a task, {tp['messages_per_task']:.3g} messages a task"
    )


def test_timeline_and_trace_show_groups_as_stages(costs: Path, tmp_path: Path) -> None:
    picture, trace = tmp_path / "t.png", tmp_path / "t.json"
    outputs = ("--timeline", picture, "--trace", trace)
    assert rrfp("simulate", "--costs", costs, "--hint", "bf", "--tp", "2", *outputs).exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    (run,) = json.loads(rrfp("trace", trace, "--json").stdout)
    assert len(run["steps"][0]["stages"]) == 3
