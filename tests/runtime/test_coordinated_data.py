"""Ranks with data of their own that run one order, and replicas that stay equal: real processes, gloo and zmq."""

from __future__ import annotations

import pytest
from compute.gloo_ranks import GOOD, cases_of, outcomes
from fork_server import fork_server
from runtime import coordinated_cases

__all__ = ["fork_server"]

CASES = cases_of(coordinated_cases)
RANKS = coordinated_cases.STAGES * coordinated_cases.DATA


@pytest.fixture(scope="module")
def on_four_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return outcomes("runtime.coordinated_cases", CASES, RANKS, tmp_path_factory.mktemp("gloo"))


@pytest.mark.parametrize("case", CASES)
def test_on_four_ranks(case: str, on_four_ranks: dict[str, list[str]]) -> None:
    found = on_four_ranks[case]
    assert found == [GOOD] * RANKS, "\n".join(found)
