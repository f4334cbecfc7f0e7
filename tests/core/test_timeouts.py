"""The order of all time limits is checked where they stand."""

from __future__ import annotations

import importlib

import pytest

from rrfp import timeouts


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("LEAVE_S", 20.0, "LEAVE_S . JOIN_S . CALLBACKS_END_S . EXIT_GRACE_S is 27.0 s, must be at most ENDED_S"),
        ("TRANSPORT_CLOSE_S", 7.0, "TRANSPORT_CLOSE_S is 7.0 s, must be at most RUNNER_CLOSE_S, which is 6.0 s"),
        ("HEARTBEAT_S", 5.0, "HEARTBEAT_S is 5.0 s, must be at most PATIENCE_S / 3"),
        ("LAST_MESSAGES_S", 3.0, "LAST_MESSAGES_S is 3.0 s, must be at most FAREWELL_TIMEOUT_S"),
    ],
)
def test_a_limit_that_outlasts_its_own_bound_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: float, text: str
) -> None:
    monkeypatch.setattr(timeouts, name, value)
    with pytest.raises(AssertionError, match=text):
        timeouts._check_order()


def test_the_order_holds_as_shipped() -> None:
    importlib.reload(timeouts)
