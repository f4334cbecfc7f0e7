"""The benchmark of forced order compares every case with free order; a quick run's figures mean nothing."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "forced_order" / "run.py"


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_every_case_is_compared_with_free_order() -> None:
    command = [sys.executable, str(SCRIPT), "--quick", "--json", "--profile", "mllm", "--profile", "branch"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    costs = json.loads(done.stdout)["costs"]
    cases = [(cost["case"]["method"], cost["case"]["limit"], cost["case"]["latency"]) for cost in costs]
    methods = ("bf", "bfw", "slot-aware, whole", "slot-aware-pyramid", "passed in pyramids")
    assert set(cases) == set(product(methods, ("1f1b", "2n"), ("wire", "spike")))
    assert {cost["case"]["stages"] for cost in costs} == {2, 4}
    columns = ("added", "forwards_too", "natural")
    assert all(math.isfinite(cost[column]) for cost in costs for column in columns)
    assert any(cost["added"] != 0 for cost in costs), "forcing an order changes something"
    assert any(cost["added"] != cost["forwards_too"] for cost in costs), "and forcing forwards changes something else"
    assert any(cost["forwards_too"] != cost["natural"] for cost in costs), "and so does forcing split backwards"
