"""Sizes of microbatches on the command line: a cost file's own, or planned ones where it has none."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
from cli.shell import rrfp

from rrfp.costs import CostTable, make_costs, read_costs, write_costs
from rrfp.lab.simulation import planned_sizes, simulate
from rrfp.lab.traces.chrome_reader import read_chrome

TABLE = make_costs("mllm", 4, 16, seed=3)
PYRAMID, WITHIN = "slot-aware-pyramid", "slot-aware"
MISSING = "has no sizes of microbatches (step(sizes=...) in the job): without them"


def file(folder: Path, table: CostTable) -> Path:
    path = folder / "costs.json"
    write_costs(path, table)
    return path


def makespan(hint: str, sizes: list[float] | None = None) -> float:
    return simulate(TABLE, hint=hint, limit="1f1b", sizes=sizes).makespan


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return file(tmp_path, TABLE)


def test_the_files_own_sizes_are_the_default(tmp_path: Path) -> None:
    sizes = planned_sizes(TABLE)[::-1]  # which no other option would give
    path = file(tmp_path, replace(TABLE, sizes=tuple(sizes)))
    options = ("--costs", path, "--hint", PYRAMID, "--limit", "1f1b")
    wanted = makespan(PYRAMID, sizes)
    assert wanted not in (makespan(PYRAMID), makespan(PYRAMID, planned_sizes(TABLE)))
    assert json.loads(rrfp("simulate", *options, "--json").stdout)["makespan"] == wanted
    (row,) = json.loads(rrfp("sweep", *options, "--json").stdout)["runs"]
    assert (row["makespan"], row["sizes"]) == (wanted, "own")
    for command in ("simulate", "sweep"):
        assert " sizes" not in rrfp(command, *options).stdout
    (planned,) = json.loads(rrfp("sweep", *options, "--sizes", "planned", "--json").stdout)["runs"]
    assert (planned["makespan"], planned["sizes"]) == (makespan(PYRAMID, planned_sizes(TABLE)), "planned")


def test_sweep_shows_both_rows_where_a_hint_lacks_sizes(plain: Path) -> None:
    result = rrfp("sweep", "--costs", plain, "--hint", f"{PYRAMID},bf", "--limit", "1f1b", "--strict", "1f1b")
    lines = result.stdout.splitlines()
    rows = {line.partition("  ")[0]: line.partition("  ")[2].split() for line in lines[2:6]}
    assert list(rows) == [
        f"{PYRAMID}, limit 1f1b, no sizes",
        f"{PYRAMID}, limit 1f1b, planned sizes",
        "bf, limit 1f1b",
        "strict 1f1b",
    ]
    without, planned = list(rows.values())[:2]
    assert float(without[0]) == pytest.approx(makespan(WITHIN), rel=1e-3)
    assert float(planned[0]) == pytest.approx(makespan(PYRAMID, planned_sizes(TABLE)), rel=1e-3)
    assert lines.count(f"{plain} {MISSING} {PYRAMID} keeps the caller's order") == 1
    assert MISSING not in rrfp("sweep", "--costs", plain, "--hint", "bf,slot-aware").stdout


def test_programs_get_only_what_they_ask_for(plain: Path, tmp_path: Path) -> None:
    table = tmp_path / "rows.csv"
    options = ("sweep", "--costs", plain, "--hint", f"{PYRAMID},bf", "--limit", "1f1b")
    assert rrfp(*options, "--csv", table).exit_code == 0
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [(row["method"], row["sizes"]) for row in rows] == [(PYRAMID, "none"), ("bf", "")]
    runs = json.loads(rrfp(*options, "--json").stdout)["runs"]
    assert [(run["method"], run["sizes"]) for run in runs] == [(PYRAMID, "none"), ("bf", None)]


@pytest.mark.parametrize("hint", [(), ("--hint", "bfw-pyramid")])
def test_simulate_says_what_planned_sizes_would_do(plain: Path, hint: tuple[str, ...]) -> None:
    options: tuple[str | Path, ...] = ("simulate", "--costs", plain, *hint, "--limit", "1f1b")
    line = rrfp(*options).stdout.splitlines()[-1]
    name = hint[-1] if hint else PYRAMID
    best = simulate(TABLE, hint=name, limit="1f1b", sizes=planned_sizes(TABLE))
    assert line == (
        f"{plain} {MISSING} {name} keeps the caller's order; --sizes planned, by the file's times: makespan "
        f"{best.makespan:.6g} s, ratio {best.ratio:.4f}"
    )
    assert rrfp(*options, "--json").stdout.count("\n") == 1
    for sized in (("--sizes", "planned"), ("--hint", "slot-aware")):
        assert " sizes" not in rrfp("simulate", "--costs", plain, "--limit", "1f1b", *sized).stdout


def test_microbatches_that_are_all_alike_need_no_sizes(tmp_path: Path) -> None:
    path = file(tmp_path, make_costs("llm", 3, 6))
    for command in ("simulate", "sweep"):
        assert MISSING not in rrfp(command, "--costs", path, "--hint", PYRAMID).stdout


def test_saved_files_of_profiles_have_the_sizes_that_ran(tmp_path: Path) -> None:
    options: tuple[str, ...] = ("--profile", "mllm", "--stages", "4", "--microbatches", "16", "--jitter", "J2")
    method = ("--hint", PYRAMID, "--limit", "1f1b", "--json")
    (row,) = json.loads(rrfp("sweep", *options, *method, "--save-costs", tmp_path).stdout)["runs"]
    (path,) = tmp_path.iterdir()
    assert json.loads(rrfp("simulate", "--costs", path, *method).stdout)["makespan"] == row["makespan"]
    assert row["sizes"] == "own"
    graph = tmp_path / "graph.json"
    options = ("--profile", "multimodal", "--stages", "4", "--microbatches", "12", "--save-costs", str(graph))
    of_profile = rrfp("simulate", *options, *method)
    assert of_profile.stdout == rrfp("simulate", "--costs", graph, *method).stdout
    assert read_costs(graph).sizes is not None


def test_groups_of_ranks_have_the_files_sizes(tmp_path: Path) -> None:
    path = file(tmp_path, replace(TABLE, sizes=tuple(planned_sizes(TABLE))))
    options = ("--hint", PYRAMID, "--limit", "1f1b", "--tp", "2", "--json")
    own = rrfp("simulate", "--costs", path, *options).stdout
    assert own == rrfp("simulate", "--costs", path, *options, "--sizes", "planned").stdout
    assert own != rrfp("simulate", "--costs", file(tmp_path, TABLE), *options).stdout


def test_a_simulated_trace_has_the_sizes_of_its_run(plain: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    assert rrfp("simulate", "--costs", plain, "--sizes", "planned", "--trace", trace).exit_code == 0
    assert read_chrome(trace)[0].steps[0].sizes == tuple(planned_sizes(TABLE))
