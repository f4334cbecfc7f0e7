"""The examples, run as their heads say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fork_server import fork_server, printed

__all__ = ["fork_server"]

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def test_all_stages_in_one_process_have_the_gradients_of_the_whole_model() -> None:
    output = printed(EXAMPLES / "local.py")
    (difference,) = re.findall(r"without a pipeline: (\S+)", output)
    assert float(difference) < 1e-12
    losses = [float(loss) for loss in re.findall(r"step \d: loss (\S+),", output)]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)


def test_two_chunks_in_a_v_train_the_same_model_within_the_same_memory() -> None:
    rows = re.findall(r"(.+): loss (\S+), chunk tasks held by rank \((\d), (\d)\)", printed(EXAMPLES / "two_chunks.py"))
    assert [row[0] for row in rows] == ["one chunk"] * 3 + ["V"] * 3
    assert [row[1] for row in rows[:3]] == [row[1] for row in rows[3:]]
    assert max(int(held) for row in rows[:3] for held in row[2:]) <= 2
    assert max(int(held) for row in rows[3:] for held in row[2:]) <= 4


def test_a_hint_from_outside_the_package_runs_beside_the_built_in_ones() -> None:
    rows = [line.split() for line in printed(EXAMPLES / "custom_hint.py").splitlines()[1:]]
    assert [row[0] for row in rows][:3] == ["DrainWhenFull", "bf", "fb"]
    assert all(float(row[3]) >= 1 for row in rows)


def test_the_deadlock_is_reported_stage_by_stage() -> None:
    head, *lines = printed(EXAMPLES / "deadlock.py").splitlines()
    assert head.endswith("deadlock in step 0: every rank is idle and nothing is in flight")
    assert [line.split(" waits for")[0] for line in lines] == ["  stage 0", "  stage 1"]
