"""`rrfp simulate --profile multimodal`: graphs from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.shell import rrfp

PROFILE = ("simulate", "--profile", "multimodal", "--stages", "4", "--microbatches", "6", "--hint", "bf")


@pytest.mark.parametrize("graph", ["chain", "branch", "colocated"])
def test_each_graph_runs_within_a_size(graph: str) -> None:
    result = rrfp(*PROFILE, "--graph", graph, "--latency", "wire", "--limit", "8MB", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    answer = json.loads(result.stdout)
    assert answer["limit_bytes"] == [8_000_000] * 4
    assert answer["lower_bound"] <= answer["makespan"]


def test_the_report_names_the_graph() -> None:
    result = rrfp(*PROFILE, "--graph", "colocated", "--limit", "1")
    assert "bf: 4 stages, a graph of 12 virtual stages, 6 microbatches" in result.stdout
    limits = [line.split()[-1] for line in result.stdout.splitlines() if line[:1].isdigit()]
    assert limits == ["3"] * 4, "slots count chunks"


def test_its_cost_file_gives_the_same_run(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    first = rrfp(*PROFILE, "--graph", "branch", "--seed", "3", "--save-costs", path, "--json")
    again = rrfp("simulate", "--costs", path, "--hint", "bf", "--json")
    assert first.stdout == again.stdout
    assert first.exit_code == 0


def test_skipping_and_visiting_differ() -> None:
    runs = [rrfp(*PROFILE, "--graph", "branch", *words, "--json").stdout for words in ((), ("--skip",), ("--no-skip",))]
    orders = [json.loads(run)["order"] for run in runs]
    assert orders[0] == orders[1]
    assert sum(map(len, orders[0])) < sum(map(len, orders[2]))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--graph", "tree"), "graph is 'tree', must be one of: chain, branch, colocated"),
        (("--graph", "chain", "--skip"), "skip goes with graph branch or colocated"),
        (("--images", "2"), "images is 2.0, must be a share of microbatches, more than 0 and at most 1"),
        (("--sizes", "planned"), "--sizes goes with --costs"),
        (("--tp", "2"), "--tp goes with --costs"),
        (
            ("--limit", "8 MB"),
            "limit is '8 MB', must be a number of microbatches or one of: 1f1b, n, 2n, auto, or a size",
        ),
        (("--latency", "slow"), "latency is 'slow', must be one of"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(words: tuple[str, ...], message: str) -> None:
    result = rrfp(*PROFILE, *words)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert message in result.stderr


def test_a_strict_schedule_is_refused_on_a_graph() -> None:
    words = [word for word in PROFILE if word not in ("--hint", "bf")]
    assert "must be a schedule file on a graph" in rrfp(*words, "--no-skip", "--strict", "1f1b").stderr
    assert rrfp(*words, "--graph", "chain", "--strict", "1f1b", "--json").exit_code == 0
