"""Pipelines over zmq with torchrun's variables; launched by torchrun itself, ordinary interpreters start and end."""

from __future__ import annotations

import fork_server as forked
import pytest
from fork_server import fork_server
from runtime.toys import TOLERANCE
from under_torchrun import reports

__all__ = ["fork_server"]


@pytest.mark.slow
def test_gradients_between_processes_are_the_references() -> None:
    """One hint or strict schedule for each way to place and to split; where it is promised, bitwise."""
    for report in forked.reports("runtime/torchrun_gradients.py", "few", ranks=4, timeout_s=50):
        assert len(report["worst"]) == 4
        assert {name: gap for name, gap in report["worst"].items() if not gap < TOLERANCE} == {}
        assert report["abort_s"] < 5


@pytest.mark.long
def test_interpreters_end_that_torchrun_started_beside_a_busy_lane_and_a_collective() -> None:
    for report in reports("runtime/torchrun_gradients.py", "ends", ranks=2, timeout_s=50):
        assert [gap < TOLERANCE for gap in report["worst"].values()] == [True]
        assert report["abort_s"] < 5


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(200)
@pytest.mark.parametrize(("what", "configurations"), [("few", 4), ("whole", 27), ("parts", 20)])
def test_gradients_between_processes_are_the_references_and_interpreters_end(what: str, configurations: int) -> None:
    """Every hint and strict schedule, with and without chunks; where it is promised, bitwise."""
    for report in reports("runtime/torchrun_gradients.py", what, ranks=4, timeout_s=180):
        assert len(report["worst"]) == configurations
        assert {name: gap for name, gap in report["worst"].items() if not gap < TOLERANCE} == {}
        assert report["abort_s"] < 5
