"""The examples, run as their heads say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def run(*command: str) -> str:
    """What a command that must succeed prints."""
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_stages_in_one_process_have_the_gradients_of_the_whole_model() -> None:
    output = run(str(EXAMPLES / "local.py"))
    (difference,) = re.findall(r"without a pipeline: (\S+)", output)
    assert float(difference) < 1e-12
    losses = [float(loss) for loss in re.findall(r"step \d: loss (\S+),", output)]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)


def test_a_hint_from_outside_the_package_runs_beside_the_built_in_ones() -> None:
    rows = [line.split() for line in run(str(EXAMPLES / "custom_hint.py")).splitlines()[1:]]
    assert [row[0] for row in rows][:3] == ["DrainWhenFull", "bf", "fb"]
    assert all(float(row[3]) >= 1 for row in rows)


def test_the_deadlock_is_reported_stage_by_stage() -> None:
    head, *lines = run(str(EXAMPLES / "deadlock.py")).splitlines()
    assert head.endswith("deadlock in step 0: every rank is idle and nothing is in flight")
    assert [line.split(" waits for")[0] for line in lines] == ["  stage 0", "  stage 1"]
