"""The paper's tables run as a whole and say what they promise; the figures of a quick run mean nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fork_server import fork_server, run

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
        *("table-1", "table-2", "table-3", "tables-4-5", "table-6", "table-7", "table-8"),
        *("limit", "statistics", "dominance"),
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


def test_a_wrong_table_is_refused_with_the_names_of_all() -> None:
    [done] = run(ROOT / "benchmarks" / "paper" / "run.py", "--only", "table-9")
    assert done.code == 2
    assert "table-1" in done.errors
    assert "dominance" in done.errors
