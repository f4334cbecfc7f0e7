"""One launch by torchrun, as users do it: real rendezvous, zmq over ipc, ordinary interpreters that start and end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from runtime.toys import TOLERANCE

TESTS = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.parametrize(("what", "configurations"), [("whole", 27), ("parts", 20)])
def test_gradients_between_processes_are_the_references_and_interpreters_end(what: str, configurations: int) -> None:
    """Every hint and strict schedule, with and without chunks; where it is promised, bitwise."""
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    done = subprocess.run(
        [*command, str(TESTS / "runtime" / "torchrun_gradients.py"), what],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    reports = {report["rank"]: report for report in map(json.loads, done.stdout.splitlines())}
    assert sorted(reports) == [0, 1, 2, 3]
    for report in reports.values():
        assert len(report["worst"]) == configurations
        assert {name: gap for name, gap in report["worst"].items() if not gap < TOLERANCE} == {}
        assert report["abort_s"] < 5
