"""Log records are sentences for people, and carry their fields for programs."""

from __future__ import annotations

import logging

import pytest

from rrfp.log import get_logger


def test_a_record_has_the_sentence_and_the_fields(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    get_logger("rrfp.test").warning("stage %d is %d%% idle", 2, 40, stage=2)
    (record,) = caplog.records
    assert (record.name, record.getMessage(), record.__dict__["stage"]) == ("rrfp.test", "stage 2 is 40% idle", 2)


def test_the_level_of_the_standard_logger_counts(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="rrfp.test")
    get_logger("rrfp.test").warning("not said")
    assert not caplog.records
