"""`rrfp sweep --tp`: groups of ranks are columns of the sweep."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from cli.shell import rrfp

from rrfp.costs import make_costs, write_costs
from rrfp.lab.cluster.simulation import simulate_tensor_parallel
from rrfp.lab.simulation import simulate

SMALL = ("sweep", "--profile", "mllm", "--stages", "3", "--microbatches", "6", "--latency", "spike")
FIGURES = ["coordination_share", "failed_rounds_per_task", "messages_per_task"]


@pytest.mark.parametrize("coordination", [None, "leader", "agreement"])
def test_a_profile_draws_every_ranks_messages_from_its_own_model_and_seed(coordination: str | None) -> None:
    way = () if coordination is None else ("--coordination", coordination)
    result = rrfp(*SMALL, "--seed", "3", "--seeds", "2", "--hint", "bf", "--limit", "n", "--tp", "3", *way, "--json")
    assert (result.exit_code, result.stderr, result.stdout.count("\n")) == (0, "", 1)
    document = json.loads(result.stdout)
    for seed, row in zip((3, 4), document["runs"], strict=True):
        run = simulate_tensor_parallel(
            make_costs("mllm", 3, 6, latency="spike", seed=seed),
            3,
            coordination="agreement" if coordination == "agreement" else "leader",
            hint="bf",
            limit="n",
            latency="spike",
            seed=seed,
        )
        one, figures = run.simulation, run.result
        assert (row["seed"], row["tp"], row["coordination"]) == (seed, 3, coordination or "leader")
        assert [row[key] for key in ("makespan", "lower_bound", "ratio")] == [one.makespan, one.lower_bound, one.ratio]
        assert row["peak_max"] == max(peak.held for peak in one.peaks)
        assert [row[key] for key in FIGURES] == [getattr(figures, key) for key in FIGURES]
        assert row["coordination_share"] > 0
    (group,) = document["summary"]
    assert (group["tp"], group["coordination"], group["seeds"]) == (3, coordination or "leader", [3, 4])
    for key in ("makespan", *FIGURES):
        assert group[key]["mean"] == sum(run[key] for run in document["runs"]) / 2


def test_ranks_and_coordinations_may_be_lists(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    lists = ("--tp", "1,2", "--coordination", "leader,agreement", "--hint", "bf", "--strict", "1f1b")
    result = rrfp(*SMALL, *lists, "--csv", path, "--plot", tmp_path / "p.png")
    assert (result.exit_code, result.stderr) == (0, "")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    ways = ["leader", "agreement", "independent"]
    assert [(row["tp"], row["coordination"]) for row in rows] == [(tp, way) for tp in "12" for way in ways]
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    alone = simulate(make_costs("mllm", 3, 6, latency="spike"), strict="1f1b")
    assert (float(rows[2]["makespan"]), rows[2]["messages_per_task"]) == (alone.makespan, "0.0")


def test_cost_files_with_groups(tmp_path: Path) -> None:
    path, costs = tmp_path / "costs.json", make_costs("mllm", 3, 6, latency="spike")
    write_costs(path, costs)
    (row,) = json.loads(rrfp("sweep", "--costs", path, "--hint", "bf", "--tp", "2", "--json").stdout)["runs"]
    run = simulate_tensor_parallel(costs, 2, hint="bf")
    assert (row["makespan"], row["coordination_share"]) == (run.simulation.makespan, run.result.coordination_share)


def test_the_table_has_columns_for_groups_alone() -> None:
    text = rrfp(*SMALL, "--hint", "bf", "--tp", "2", "--coordination", "agreement", "--seeds", "3").stdout
    title, heads, row = text.splitlines()
    assert title == (
        "mllm, stages 3, microbatches 6, whole backward, tp 2, J0, latency spike; 3 seeds: mean, least and most"
    )
    assert heads.endswith("coordination  failed rounds a task  messages a task")
    assert row.startswith("bf, limit 2n, agreement")
    assert row.count("±") == 4
    assert "coordination" not in rrfp(*SMALL, "--hint", "bf").stdout


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
    "no group": (("--hint", "bf", "--tp", "0"), "tp is 0, must be a whole number >= 1"),
    "a word as group": (("--hint", "bf", "--tp", "2,all"), "tp is 'all', must be a whole number >= 1"),
    "coordination alone": (("--hint", "bf", "--coordination", "leader"), "--coordination goes with --tp"),
    "unknown": (
        ("--hint", "bf", "--tp", "2", "--coordination", "x"),
        "coordination is 'x', must be one of: leader, agreement",
    ),
    "strict": (("--strict", "1f1b", "--tp", "2", "--coordination", "leader"), "--coordination goes with --hint"),
    "paper's rule": (("--hint", "bf", "--tp", "2", "--admission", "paper"), "must be staircase with tp"),
    "blocking": (("--strict", "1f1b", "--tp", "2", "--sends", "blocking"), "must be eager with tp"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_usage_is_one_line_and_exit_2(name: str) -> None:
    words, message = BAD[name]
    result = rrfp(*SMALL, *words)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert message in result.stderr
