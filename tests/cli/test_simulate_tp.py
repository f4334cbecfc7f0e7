"""`rrfp simulate --tp`: groups of ranks through the command line, one run or several seeds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.shell import rrfp
from cli.test_simulate import KEYS

from rrfp.costs import make_costs, write_costs
from rrfp.sim.cluster.simulation import simulate_tensor_parallel

SMALL = ("simulate", "--profile", "mllm", "--stages", "3", "--microbatches", "6", "--latency", "spike")
FIGURES = ["makespan", "ratio", "peak_max", "coordination_share", "failed_rounds_per_task", "messages_per_task"]


@pytest.mark.parametrize("coordination", [None, "leader", "agreement"])
def test_a_profile_draws_every_ranks_messages_from_its_own_model_and_seed(coordination: str | None) -> None:
    way = () if coordination is None else ("--coordination", coordination)
    result = rrfp(*SMALL, "--seed", "4", "--hint", "bf", "--limit", "n", "--tp", "3", *way, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    costs = make_costs("mllm", 3, 6, latency="spike", seed=4)
    told = simulate_tensor_parallel(
        costs,
        3,
        coordination="agreement" if coordination == "agreement" else "leader",
        hint="bf",
        limit="n",
        latency="spike",
        seed=4,
    )
    answer = json.loads(result.stdout)
    assert answer == json.loads(json.dumps(told.to_json()))
    assert list(answer) == [*KEYS, "tp"]
    assert answer["tp"]["ranks"] == 3
    assert answer["tp"]["coordination_share"] > 0


def test_a_cost_files_own_latencies_are_shuffled(tmp_path: Path) -> None:
    path, costs = tmp_path / "costs.json", make_costs("mllm", 3, 6, latency="spike")
    write_costs(path, costs)
    result = rrfp("simulate", "--costs", path, "--hint", "bf", "--tp", "2", "--json")
    assert result.stdout == json.dumps(simulate_tensor_parallel(costs, 2, hint="bf").to_json()) + "\n"


def test_one_rank_runs_as_without_groups() -> None:
    alone, group = (json.loads(rrfp(*SMALL, "--hint", "bf", *tp, "--json").stdout) for tp in ((), ("--tp", "1")))
    assert group["tp"]["messages_per_task"] == 0
    assert {key: group[key] for key in KEYS} == alone


def test_a_strict_schedule_needs_no_coordination() -> None:
    result = rrfp(*SMALL, "--strict", "1f1b", "--tp", "4", "--json")
    told = json.loads(result.stdout)["tp"]
    assert (told["coordination"], told["messages_per_task"], told["coordination_share"]) == ("independent", 0, 0)


def test_the_text_shows_what_coordination_costs() -> None:
    lines = rrfp(*SMALL, "--hint", "bf", "--tp", "4", "--coordination", "agreement").stdout.splitlines()
    assert lines[0] == "bf, mllm J0, latency spike, seed 0: 3 stages, 6 microbatches"
    told = json.loads(rrfp(*SMALL, "--hint", "bf", "--tp", "4", "--coordination", "agreement", "--json").stdout)["tp"]
    assert told["failed_rounds_per_task"] > 0
    assert lines[-1] == (
        f"4 ranks a stage, agreement: coordination {told['coordination_share']:.2%} of the step, "
        f"{told['failed_rounds_per_task']:.3g} failed rounds a task, {told['messages_per_task']:.3g} messages a task"
    )


def test_timeline_and_trace_show_groups_as_stages(tmp_path: Path) -> None:
    picture, trace = tmp_path / "t.png", tmp_path / "t.json"
    assert rrfp(*SMALL, "--hint", "bf", "--tp", "2", "--timeline", picture, "--trace", trace).exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    (run,) = json.loads(rrfp("trace", trace, "--json").stdout)
    assert len(run["steps"][0]["stages"]) == 3


def test_seeds_are_the_single_runs_and_their_spread() -> None:
    method = ("--hint", "bf", "--tp", "2", "--coordination", "agreement")
    result = rrfp(*SMALL, *method, "--seed", "3", "--seeds", "2", "--json")
    assert (result.exit_code, result.stderr, result.stdout.count("\n")) == (0, "", 1)
    document = json.loads(result.stdout)
    assert list(document) == ["runs", "summary"]
    assert [run["seed"] for run in document["runs"]] == [3, 4]
    for run in document["runs"]:
        single = json.loads(rrfp(*SMALL, *method, "--seed", str(run["seed"]), "--json").stdout)
        assert [run[key] for key in ("makespan", "lower_bound", "ratio")] == [
            single[key] for key in ("makespan", "lower_bound", "ratio")
        ]
        assert run["peak_max"] == max(single["peak"])
        for key in ("coordination_share", "failed_rounds_per_task", "messages_per_task"):
            assert run[key] == single["tp"][key]
    summary = document["summary"]
    assert list(summary) == ["tp", "coordination", *FIGURES]
    assert (summary["tp"], summary["coordination"]) == (2, "agreement")
    assert summary["makespan"]["mean"] == sum(run["makespan"] for run in document["runs"]) / 2


def test_seeds_do_not_depend_on_jobs_and_are_shown_as_a_table() -> None:
    seeds = (*SMALL, "--hint", "bf", "--tp", "2", "--seeds", "3")
    assert rrfp(*seeds, "--jobs", "1", "--json").stdout == rrfp(*seeds, "--jobs", "2", "--json").stdout
    lines = rrfp(*seeds).stdout.splitlines()
    title = "bf, mllm J0, latency spike: 3 stages, 6 microbatches, 2 ranks a stage, leader; 3 seeds"
    assert lines[0] == title
    assert [line.split("  ")[0].strip() for line in lines[2:]] == [
        "makespan (s)",
        "makespan / bound",
        "peak held",
        "coordination",
        "failed rounds a task",
        "messages a task",
    ]


def test_a_deadlock_names_its_seed(tmp_path: Path) -> None:
    path = tmp_path / "silent.py"
    path.write_text(
        "from rrfp import Hint\n\n\nclass Silent(Hint):\n    may_wait = True\n\n"
        "    def choose(self, ready, view):\n        return next(iter(ready)) if view.stage == 0 else None\n"
    )
    result = rrfp(*SMALL, "--hint", f"{path}:Silent", "--tp", "2", "--seed", "8", "--seeds", "2", "--jobs", "1")
    assert (result.exit_code, result.stdout) == (3, "")
    assert "seed=8, tp=2: " in result.stderr.splitlines()[0]


BAD = {
    "no group": (("--hint", "bf", "--tp", "0"), "Invalid value for '--tp'"),
    "coordination alone": (("--hint", "bf", "--coordination", "leader"), "--coordination goes with --tp"),
    "unknown": (
        ("--hint", "bf", "--tp", "2", "--coordination", "x"),
        "coordination is 'x', must be one of: leader, agreement",
    ),
    "strict": (("--strict", "1f1b", "--tp", "2", "--coordination", "leader"), "--coordination goes with --hint"),
    "paper's rule": (("--hint", "bf", "--tp", "2", "--admission", "paper"), "must be staircase with --tp"),
    "blocking": (("--strict", "1f1b", "--tp", "2", "--sends", "blocking"), "must be eager with --tp"),
    "two hints": (("--hint", "bf,fb", "--tp", "2"), "--tp takes one value of every option but --seeds, these are 2"),
    "two sizes": (("--hint", "bf", "--tp", "2", "--jitter", "J0,J1", "--seeds", "2"), "these are 4 runs"),
    "csv": (("--hint", "bf", "--tp", "2", "--csv", "r.csv"), "--csv goes without --tp"),
    "plot": (("--hint", "bf", "--tp", "2", "--png", "p.png"), "--png goes without --tp"),
    "timeline of seeds": (("--hint", "bf", "--tp", "2", "--seeds", "2", "--timeline", "t.png"), "--timeline shows one"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_usage_is_one_line_and_exit_2(name: str) -> None:
    words, message = BAD[name]
    result = rrfp(*SMALL, *words)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert message in result.stderr
