"""The benchmark of replicas compares what it says it compares."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from installed import ROOT

from benchmarks.replicas.settings import METHODS, Layout
from benchmarks.replicas.simulated import rows


def test_dealing_lies_between_the_bound_and_replicas_alone() -> None:
    every = [*rows((Layout(4, 2),), 2)]
    found = {(row.kind, row.factor): row for row in every if row.slow < 2}
    assert found["J0", 1.0].plain == found["J0", 1.0].dealt == pytest.approx(1.0)
    for factor in (1.5, 2.0, 4.0):
        row = found["J0", factor]
        assert row.dropped is not None
        assert row.bound is not None
        assert row.bound <= row.dealt < min(row.plain, row.dropped)
        assert row.moved > 0
        assert row.bound <= row.claimed < row.plain
    late = found["late", 2.0]
    assert late.claimed < late.plain - 0.1
    two = next(row for row in every if (row.kind, row.factor, row.slow) == ("J0", 2.0, 2))
    assert two.bound is not None
    assert two.bound <= two.claimed < two.dealt - 0.2
    assert found["uneven", 1.0].dealt < 0.97  # sizes tell which replica has more
    assert found["J0", 2.0].plain > 1.5
    assert found["J0", 2.0].dealt < 1.4


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_processes_run_all_methods_with_every_factor() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "replicas" / "run.py"), "--quick", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = {(row["method"], row["factor"]): row for row in json.loads(done.stdout)["rows"]}
    assert set(found) == {(method, factor) for method in METHODS for factor in (1.0, 4.0)}
    assert found["dealt", 4.0]["moved_bytes"] > 0
