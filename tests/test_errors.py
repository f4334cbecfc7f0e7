"""Mistakes that are independent of each other are named together."""

from __future__ import annotations

import pytest

from rrfp.errors import ConfigError, Faults


def check_all(*errors: Exception | None) -> int:
    """Run a check for each entry, which raises it; returns the number of checks that were run."""
    num_run = 0
    with Faults() as faults:
        for error in errors:
            num_run += 1
            with faults.kept():
                if error is not None:
                    raise error
    return num_run


def test_all_kept_faults_are_one_error_in_order_and_each_once() -> None:
    with pytest.raises(ConfigError) as caught:
        check_all(ConfigError("b is 1"), None, ConfigError("a is 2"), ConfigError("b is 1"))
    assert str(caught.value) == "b is 1; a is 2"


def test_one_fault_is_raised_as_it_was() -> None:
    error = ConfigError("a is 1")
    with pytest.raises(ConfigError) as caught:
        check_all(None, error)
    assert caught.value is error


def test_without_a_fault_nothing_is_raised() -> None:
    assert check_all(None, None) == 2


def test_any_other_error_passes_at_once() -> None:
    with pytest.raises(ZeroDivisionError):
        check_all(ConfigError("a is 1"), ZeroDivisionError(), ConfigError("b is 2"))
