"""The paper's tables run as a whole and say what they promise; the figures of a quick run mean nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fork_server import fork_server, run

from benchmarks.paper.theorem import flow, terms
from rrfp.costs import CostTable, make_costs
from rrfp.engine.engine import run as run_engine
from rrfp.hints.registry import create_hint
from rrfp.memory.admission import Limit

__all__ = ["fork_server"]

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.long
def test_every_table_of_the_paper_has_its_figures_beside_ours_and_what_they_rest_on(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "paper" / "run.py"),
        "--quick",
        "--json",
        "--out",
        str(tmp_path),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    document = json.loads(done.stdout)
    tables = document["tables"]

    assert list(tables) == [
        *("table-1", "table-2", "messages", "table-3", "tables-4-5", "table-6", "table-7", "table-8"),
        *("limit", "statistics", "dominance", "theorem"),
    ]
    for table in tables.values():
        assert table["rows"]
        assert all(len(row) == len(table["columns"]) for row in table["rows"])
    for name in ("table-1", "table-2"):
        assert tables[name]["columns"][-1] == "BF rests on"
        for row in tables[name]["data"]:
            product = row["factors"]["sends"] * row["factors"]["order"] * row["factors"]["memory"]
            assert product == pytest.approx(row["over_blocking"]["bf"], rel=0.05)  # means of ratios, one seed
            assert row["factors"]["sends"] >= 1, "blocking sends are never faster"
            assert row["paper"]["bfw"] > row["paper"]["bf"] > 1
    assert [Path(path).name for path in document["pictures"]] == [
        "table-1.png",
        "table-2.png",
        "table-6.png",
        "limit.png",
    ]
    assert all((tmp_path / Path(path).name).stat().st_size > 10_000 for path in document["pictures"])


@pytest.mark.parametrize("seed", range(4))
def test_theorem_6_1_holds_where_its_assumptions_do(seed: int) -> None:
    costs = make_costs("mllm", 4, 12, seed=seed, jitter="J2")
    ideal, sums = terms(costs)
    step = run_engine(costs, [create_hint("bf") for _ in range(4)], [Limit()] * 4).makespan
    assert step <= ideal + sums + 1e-9


def test_both_sums_vanish_where_the_last_stage_is_the_slowest() -> None:
    forward = np.array([[1.0, 2.0, 1.0], [3.0, 3.0, 2.0]])
    edges = np.zeros((1, 3))
    costs = CostTable(2, 1, "looped", 3, forward, 2 * forward, None, edges, edges)
    assert flow(forward) == 9  # 1 until the second stage begins, then 3 + 3 + 2
    assert terms(costs) == (9 + 18, 0)  # backwards: 6, 6, 4 on the last stage; on the first 2, 4, 2 after each


def test_a_wrong_table_is_refused_with_the_names_of_all() -> None:
    [done] = run(ROOT / "benchmarks" / "paper" / "run.py", "--only", "table-9")
    assert done.code == 2
    assert "table-1" in done.errors
    assert "dominance" in done.errors
