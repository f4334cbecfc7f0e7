"""The memory benchmark measures every method in real processes; a quick run's times mean nothing, its bytes do."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from fork_server import Ended, fork_server, run

__all__ = ["fork_server"]

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "memory" / "run.py"
MIB = 1 << 20
#: Of the quick run: an activation inside a stage, and what travels; a stage has two parts.
WIDE, NARROW = MIB, MIB // 4
#: What a microbatch keeps on a stage after its forward, and after a split backward.
AFTER_FORWARD, AFTER_BACKWARD = 2 * (WIDE + NARROW), 4 * (WIDE + NARROW)


def benchmark(*arguments: str) -> Ended:
    [ended] = run(SCRIPT, *arguments, timeout_s=150)
    return ended


@pytest.mark.long
@pytest.mark.timeout(180)
def test_every_hint_is_measured_at_every_limit_beside_strict_schedules() -> None:
    done = benchmark("--quick", "--json")
    assert done.code == 0, done.errors[-4000:]
    document = json.loads(done.output)
    methods: dict[tuple[str, str], Any] = {(one["name"], one["limit"]): one for one in document["figures"]}
    hints = product(("bf", "bfw"), ("1", "1f1b", "n", "2n", "bytes"))
    assert set(methods) == {("1f1b", ""), ("zb-h1", ""), ("zb-v", ""), *hints}
    strict = methods["1f1b", ""]
    assert (strict["held"], strict["per_baseline"]) == ([2, 1], 1.0)
    # Beside what microbatches keep there may be outputs on their way; the loss keeps the last one, and the target.
    assert 2 * AFTER_FORWARD <= strict["held_bytes"][0] <= 2 * AFTER_FORWARD + 2 * NARROW
    assert strict["held_bytes"][1] == AFTER_FORWARD + 2 * NARROW
    limits = {"1": (1, 1), "1f1b": (2, 1), "n": (2, 2), "2n": (4, 4)}
    for (name, limit), one in methods.items():
        assert all(held <= most for held, most in zip(one["held"], limits.get(limit, (4, 4)), strict=True)) or not limit
        assert all(held >= AFTER_FORWARD for held in one["held_bytes"]), name
        # All that is counted is really there, but for the inputs of the first stage, which were there before.
        inputs = max(one["held"]) * NARROW
        assert all(
            grown >= held - inputs - MIB for grown, held in zip(one["grown_bytes"], one["held_bytes"], strict=True)
        )
    bytes_limit = max(strict["held_bytes"])
    for name in ("bf", "bfw"):
        assert max(methods[name, "bytes"]["held_bytes"]) <= max(bytes_limit + AFTER_FORWARD, AFTER_BACKWARD + NARROW)


def test_bad_arguments_are_refused_in_one_line() -> None:
    done = benchmark("--rounds", "0")
    assert done.code == 2
    assert "--rounds is 0, must be at least 1" in done.errors
    assert "Traceback" not in done.errors
