"""Refusals are counted, and logged at most once a second."""

from __future__ import annotations

import logging

import pytest

from rrfp.log import get_logger
from rrfp.transports.links.rate_limited_log import RateLimitedLog


def test_a_flood_is_a_line_a_second_that_counts_the_others(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 5.0
    refusals = RateLimitedLog(get_logger("rrfp.tests"), lambda: now_s)
    with caplog.at_level(logging.WARNING):
        for now_s in (5.0, 5.0, 5.9, 6.0, 6.5, 8.0, 9.0):
            refusals.add(f"refused at {now_s}")
    assert refusals.count == 7
    assert caplog.messages == [
        "refused at 5.0",
        "refused at 6.0 (2 more since the last line)",
        "refused at 8.0 (1 more since the last line)",
        "refused at 9.0",
    ]
