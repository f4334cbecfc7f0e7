"""Tensor, data and pipeline parallelism together, between real processes: gloo, DTensor and zmq."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fork_server as forked
import pytest
from compute.gloo_ranks import GOOD, outcomes
from fork_server import fork_server
from runtime.toys import TOLERANCE
from under_torchrun import reports

__all__ = ["fork_server"]

pytestmark = pytest.mark.slow


@pytest.mark.timeout(100)
def test_two_dims_of_parallelism_give_the_references_gradients_and_a_failure_ends_a_collective() -> None:
    check(forked.reports("runtime/torchrun_tensor_parallel.py", "few", ranks=4, timeout_s=90), 4)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("what", "cases"), [("few", 4), ("all", 21)])
def test_so_they_do_under_torchrun(what: str, cases: int) -> None:
    check(reports("runtime/torchrun_tensor_parallel.py", what, ranks=4, timeout_s=280), cases)


def check(found: list[dict[str, Any]], cases: int) -> None:
    for report in found:
        assert len(report["worst"]) == cases
        assert {name: gap for name, gap in report["worst"].items() if not gap < TOLERANCE} == {}
        assert report["abort_s"] < 5
        assert "is a DTensor over the ranks" in report["refused"]
        assert "coordinate is ('tp',), must be ('tp', 'dp')" in report["refused"]
    assert sum(report["disagreements"] for report in found) > 0  # else members saw the same anyway


@pytest.mark.long
@pytest.mark.timeout(200)
def test_three_dims_of_parallelism_give_the_references_gradients(tmp_path: Path) -> None:
    found = outcomes("runtime.torchrun_tensor_parallel", ["three_dims"], 8, tmp_path, timeout_s=180)["three_dims"]
    assert found == [GOOD] * 8, "\n".join(found)
