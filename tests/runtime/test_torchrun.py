"""Launches by torchrun, as users do it: real rendezvous, zmq over ipc, ordinary interpreters that start and end."""

from __future__ import annotations

import pytest
from runtime.toys import TOLERANCE
from under_torchrun import reports


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "configurations"),
    [
        ("few", 4),
        pytest.param("whole", 27, marks=[pytest.mark.long, pytest.mark.timeout(200)]),
        pytest.param("parts", 20, marks=[pytest.mark.long, pytest.mark.timeout(200)]),
    ],
)
def test_gradients_between_processes_are_the_references_and_interpreters_end(what: str, configurations: int) -> None:
    """Every hint and strict schedule, with and without chunks; where it is promised, bitwise."""
    for report in reports("runtime/torchrun_gradients.py", what, ranks=4, timeout_s=50 if what == "few" else 180):
        assert len(report["worst"]) == configurations
        assert {name: gap for name, gap in report["worst"].items() if not gap < TOLERANCE} == {}
        assert report["abort_s"] < 5
