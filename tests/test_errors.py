"""Mistakes that are independent of each other are named together."""

from __future__ import annotations

import re

import pytest
from installed import ROOT

from rrfp.errors import ConfigError, Faults, misspelt
from rrfp.runtime.abort import describe


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
    assert str(caught.value) == "2 faults:\n- b is 1\n- a is 2"
    assert describe(caught.value) == "ConfigError: b is 1; a is 2"


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


@pytest.mark.parametrize(
    ("name", "meant"),
    [("smh", "shm"), ("shmm", "shm"), ("SHM", "shm"), ("shortm", None), ("zqm", "zmq"), ("zmpq", "zmq"), ("tcp", None)],
)
def test_a_misspelt_name_is_answered_with_the_one_that_is_meant(name: str, meant: str | None) -> None:
    wanted = repr(name) if meant is None else f"{name!r} (did you mean {meant!r}?)"
    assert misspelt(name, ["inproc", "shm", "zmq"]) == wanted


def test_every_error_lists_choices_behind_a_colon() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "rrfp").rglob("*.py")}
    assert [path for path, text in texts.items() if re.search(r"must be (?:\w+ )?one of [{\[]", text)] == []
