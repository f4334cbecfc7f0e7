"""Tensor, data and pipeline parallelism together, between real processes: torchrun, gloo, DTensor and zmq."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from runtime.toys import TOLERANCE

TESTS = Path(__file__).parent.parent

pytestmark = pytest.mark.slow


def launch(ranks: int, timeout_s: float) -> list[dict[str, Any]]:
    """What each rank reports."""
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*command, str(TESTS / "runtime" / "torchrun_tensor_parallel.py")],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    reports = sorted(map(json.loads, done.stdout.splitlines()), key=lambda report: int(report["rank"]))
    assert [report["rank"] for report in reports] == list(range(ranks))
    return reports


def assert_right(reports: list[dict[str, Any]], cases: int) -> None:
    """Gradients and losses are the reference's on every rank; and it was no matter of members that saw the same."""
    for report in reports:
        assert len(report["worst"]) == cases
        assert {name: gap for name, gap in report["worst"].items() if not gap < TOLERANCE} == {}
    assert sum(report["disagreements"] for report in reports) > 0


@pytest.mark.timeout(120)
def test_two_dims_of_parallelism_give_the_references_gradients_and_a_failure_ends_a_collective() -> None:
    reports = launch(4, 110)
    assert_right(reports, cases=21)
    for report in reports:
        assert report["abort_s"] < 5
        assert "is a DTensor over the ranks" in report["refused"]
        assert "coordinate is ('tp',), must be ('tp', 'dp')" in report["refused"]


@pytest.mark.timeout(90)
def test_three_dims_of_parallelism_give_the_references_gradients() -> None:
    assert_right(launch(8, 80), cases=3)
