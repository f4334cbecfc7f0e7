"""Gradients of DTensor parameters: their sum over replicas, their norm, and the meshes that are refused."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from compute.gloo_ranks import GOOD, outcomes
from fork_server import fork_server

__all__ = ["fork_server"]

#: Read and not imported: that takes seconds, which the processes of the cases spend side by side.
_SOURCE = ast.parse((Path(__file__).parent / "sharded_cases.py").read_text())
CASES = [
    each.name
    for each in _SOURCE.body
    if isinstance(each, ast.FunctionDef) and [argument.arg for argument in each.args.args] == ["rank"]
]
RANKS = 4


@pytest.fixture(scope="module")
def on_four_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return outcomes("compute.sharded_cases", CASES, RANKS, tmp_path_factory.mktemp("gloo"))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_on_two_replicas_of_two_members(case: str, on_four_ranks: dict[str, list[str]]) -> None:
    outcomes = on_four_ranks[case]
    assert outcomes == [GOOD] * RANKS, "\n".join(dict.fromkeys(outcomes))
