"""A job that is suspended as a whole goes on and prints nothing. `benchmarks/suspend/run.py` does it 300 times."""

from __future__ import annotations

import pytest
from fork_server import context, fork_server

from benchmarks.suspend.run import suspend

__all__ = ["fork_server"]

pytestmark = pytest.mark.slow


def test_a_suspended_job_goes_on_and_prints_nothing() -> None:
    """Once its processes alone, once with the helpers that print stacks; for longer than any limit."""
    outcome = suspend(context(), 2, seed=3, abort_after=2.0, patience=2.0)
    assert (outcome.stops, outcome.crashes, outcome.printed) == (2, [], [])
