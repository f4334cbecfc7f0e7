"""Checkpoints of a job that has lost ranks: written by those that are left, loaded by all of the next one."""

from __future__ import annotations

import pytest
from compute.gloo_ranks import GOOD, cases_of, outcomes
from fork_server import fork_server
from runtime import survivor_cases

__all__ = ["fork_server"]

CASES = cases_of(survivor_cases)


@pytest.fixture(scope="module")
def on_four_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return outcomes("runtime.survivor_cases", CASES, 4, tmp_path_factory.mktemp("gloo"))


@pytest.mark.parametrize("case", CASES)
def test_on_four_ranks(case: str, on_four_ranks: dict[str, list[str]]) -> None:
    assert on_four_ranks[case] == [GOOD] * 4, "\n".join(on_four_ranks[case])
