"""`rrfp sweep` on cost files of graphs: the figures of `rrfp simulate`, and what goes with chains only is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli.shell import rrfp

METHODS = ("--hint", "bf,slot-aware", "--limit", "2,8MB,bytes:n")


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """A cost file of each form of one model."""
    found = {graph: tmp_path / f"{graph}.json" for graph in ("chain", "branch", "colocated")}
    for graph, path in found.items():
        size = ("--stages", "4", "--microbatches", "6", "--latency", "wire", "--hint", "bf")
        made = rrfp("simulate", "--profile", "multimodal", "--graph", graph, *size, "--save-costs", path)
        assert made.exit_code == 0, made.stderr
    return found


def test_runs_on_graphs_are_those_of_simulate(files: dict[str, Path]) -> None:
    paths = [str(files[graph]) for graph in ("branch", "colocated")]
    swept = rrfp("sweep", "--costs", ",".join(paths), *METHODS, "--json")
    assert (swept.exit_code, swept.stderr) == (0, "")
    runs: list[dict[str, Any]] = json.loads(swept.stdout)["runs"]
    assert len(runs) == 12
    for run in runs:
        method = ("--hint", run["method"], "--limit", run["limit"])
        alone = json.loads(rrfp("simulate", "--costs", run["costs"], *method, "--json").stdout)
        assert (run["makespan"], run["lower_bound"]) == (alone["makespan"], alone["lower_bound"])
        assert run["peak_max"] == max(alone["peak"])
        assert run["placement"] == "table"


def test_the_report_says_that_a_file_has_a_graph(files: dict[str, Path]) -> None:
    single = rrfp("sweep", "--costs", files["branch"], "--hint", "bf").stdout
    assert single.splitlines()[0] == f"{files['branch']}, stages 4, microbatches 6, a graph, whole backward"
    # "chunks" would be the most that any stage has.
    both = rrfp("sweep", "--costs", f"{files['branch']},{files['colocated']}", "--hint", "bf").stdout
    assert both.splitlines()[0] == "stages 4, microbatches 6, a graph, whole backward"
    assert both.splitlines()[1].split()[:2] == ["costs", "method"]
    beside_a_chain = rrfp("sweep", "--costs", f"{files['chain']},{files['branch']}", "--hint", "bf").stdout
    assert [line.split()[1:3] for line in beside_a_chain.splitlines()[1:] if "json" in line or "costs" in line] == [
        ["placement", "method"],
        ["looped", "bf,"],
        ["a", "graph"],
    ]


def test_sizes_csv_and_picture_work_on_graphs(files: dict[str, Path], tmp_path: Path) -> None:
    paths = ",".join(map(str, files.values()))
    names = [tmp_path / "runs.csv", tmp_path / "runs.png"]
    outputs = ("--csv", names[0], "--plot", names[1])
    result = rrfp("sweep", "--costs", paths, "--sizes", "planned", "--hint", "slot-aware-pyramid", *outputs)
    assert (result.exit_code, result.stderr) == (0, "")
    assert [line.split(",")[5] for line in names[0].read_text().splitlines()] == [
        "placement",
        *("looped", "table", "table"),
    ]
    assert names[1].stat().st_size > 1000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--strict", "1f1b"),
            "strict needs microbatches that visit every virtual stage, and some skip one: take a hint",
        ),
        (("--hint", "1f1b"), "schedule 1f1b takes a chain with equally many chunks on each stage"),
        (("--hint", "bf", "--tp", "2"), "tp: groups of ranks are simulated on chains only, and these costs"),
    ],
)
def test_what_goes_with_chains_only_is_refused_by_name(
    files: dict[str, Path], words: tuple[str, ...], message: str
) -> None:
    result = rrfp("sweep", "--costs", files["branch"], *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_beside_a_method_that_fits_others_are_left_out_and_named(files: dict[str, Path]) -> None:
    result = rrfp("sweep", "--costs", files["branch"], "--hint", "bf,gpipe", "--strict", "zb-h1")
    assert result.exit_code == 0
    assert "skipped 1 run of hint gpipe: schedule gpipe takes a chain" in result.stdout
    assert "skipped 1 run of strict zb-h1: strict needs microbatches that visit every virtual stage" in result.stdout
