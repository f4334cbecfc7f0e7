"""The benchmark of own sizes compares what it says it compares."""

from __future__ import annotations

from argparse import Namespace

import pytest

from benchmarks.own_sizes.run import Study, shown_by
from rrfp.costs import make_costs, microbatch_sizes

ARGUMENTS = Namespace(stages=[2], jitter=["J0"], seeds=2, unsplit=False)


def test_inputs_never_pass_the_limit_and_every_way_has_a_cell() -> None:
    cells = list(Study("modalities", ARGUMENTS).bytes())
    assert [(cell.limit, cell.way) for cell in cells] == [
        (limit, way) for limit in ("1f1b", "n") for way in ("inputs", "sizes")
    ]
    assert all(cell.extra <= 0 for cell in cells if cell.way == "inputs")
    assert all(cell.worst <= cell.mean for cell in cells)


def test_the_rule_takes_one_pyramid_where_sizes_order_all_stages_and_only_there() -> None:
    for profile, is_one in (("bimodal", True), ("modalities", False)):
        ways = {(cell.limit, cell.way): cell for cell in Study(profile, ARGUMENTS).order()}
        for limit in ("1f1b", "n", "2n"):
            assert ways[limit, "rule"].mean == (ways[limit, "one"].mean if is_one else 0.0)


def test_the_correlation_is_the_least_of_all_stages() -> None:
    def shown(profile: str) -> float:
        correlation = shown_by(make_costs(profile, 4, 32, seed=1), microbatch_sizes(profile, 4, 32, seed=1))
        assert correlation is not None
        return correlation

    assert shown("zipf") == pytest.approx(1.0)
    assert shown("modalities") < 0.9
    assert shown_by(make_costs("llm", 4, 8), microbatch_sizes("llm", 4, 8)) is None
