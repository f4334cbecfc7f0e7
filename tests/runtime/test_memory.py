"""The bytes that a stage counts are the bytes that its process holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("memory_growth.py")
MIB = 1 << 20
#: What one microbatch keeps on a stage: its input and five Tanh outputs, 8 MiB each; with a loss, the target too.
MICROBATCH, WITH_LOSS = 6 * 8 * MIB, 7 * 8 * MIB


def measure(stages: int, hint: str, limit: int) -> Any:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, str(SCRIPT), str(stages), hint, str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=50, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.long
@pytest.mark.parametrize("hint", ["f-priority", "bfw"])
def test_the_count_is_within_15_percent_or_64_mib_of_what_the_process_grows_by(hint: str) -> None:
    told = measure(1, hint, 4)
    (counted,) = told["counted"]
    assert abs(counted - told["grown"]) <= max(0.15 * told["grown"], 64 * MIB), told


@pytest.mark.long
def test_a_byte_limit_is_kept_and_used() -> None:
    limit = 3 * WITH_LOSS + 10 * MIB
    told = measure(1, "f-priority", limit)
    assert told["held"] == [3], told
    assert told["counted"] == [3 * WITH_LOSS]


@pytest.mark.long
def test_an_output_that_its_own_backward_keeps_counts_once() -> None:
    """A stage's output is its last Tanh's, which backward needs: on its way out it takes no memory of its own."""
    told = measure(2, "f-priority", 4)
    assert told["held"][0] == 4  # how many stage 1 holds depends on how fast it is
    assert told["counted"][0] == 4 * MICROBATCH
    total = sum(told["counted"])
    assert told["grown"] <= total + max(0.15 * total, 64 * MIB), told
