"""Log records are sentences for people, carry their fields for programs, and do not flood the log."""

from __future__ import annotations

import logging

import pytest

from rrfp.log import RateLimitedLog, get_logger


def test_a_record_has_the_sentence_and_the_fields(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    get_logger("rrfp.test").warning("stage %d is %d%% idle", 2, 40, stage=2)
    (record,) = caplog.records
    assert (record.name, record.getMessage(), record.__dict__["stage"]) == ("rrfp.test", "stage 2 is 40% idle", 2)


def test_the_level_of_the_standard_logger_counts(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="rrfp.test")
    get_logger("rrfp.test").warning("not said")
    assert not caplog.records


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
