"""The split-backward benchmark compares all ways; a quick run's times mean nothing, what is kept does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "split_backward" / "run.py"


@pytest.mark.long
@pytest.mark.timeout(180)
def test_all_ways_are_compared_in_time_and_bytes() -> None:
    command = [sys.executable, str(SCRIPT), "--quick", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    document = json.loads(done.stdout)
    (ways,) = document["figures"].values()
    ordinary, rrfp, everything, nothing, torchs = (
        ways[way] for way in ("ordinary", "rrfp", "rrfp, all deferred", "rrfp, none deferred", "torch pipelining")
    )
    assert (ordinary["total"], ordinary["kept"]) == (1.0, None)
    assert ordinary["backward"] == pytest.approx(1.0, abs=0.05)  # with the W that does nothing
    # At this size no layer is worth it: what waits is the small gradients themselves.
    assert rrfp["kept_bytes"] == pytest.approx(nothing["kept_bytes"], abs=1 << 18)
    assert rrfp["kept"] < 0.5
    # Inputs and output gradients of the linear layers, and little else; torch keeps much more.
    assert 0.95 <= everything["kept"] <= 1.10
    assert torchs["kept"] > 1.3
    (layer,) = document["layers"]
    assert layer["product_s"] > 0
    assert layer["flops"] == 2 * 256 * layer["hidden"] ** 2
    assert document["aims"] == []
