"""Several processes on one device: what one sends, the other receives on the device, whatever the transport."""

from __future__ import annotations

from typing import Any

import pytest
from gpu.models import DEMO, LARGE
from under_torchrun import reports

from benchmarks.gpu.target import Target

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]


def check(model: str, tolerance: float, ranks: int, methods: list[str], target: Target, record_property: Any) -> None:
    for report in reports("gpu/rank.py", target.name, model, *methods, ranks=ranks, timeout_s=200):
        assert report["problems"] == []
        for method, (gradients, losses) in report["worst"].items():
            name = f"rank {report['rank']}, {method}: relative differences of gradients and losses"
            record_property(name, f"{gradients:.2g}, {losses:.2g} (at most {tolerance:g})")
            assert gradients <= tolerance
            assert losses <= tolerance


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_demos_gpt_over_zmq(ranks: int, target: Target, record_property: Any) -> None:
    methods = ["bf", "bfw, split"] if ranks == 2 else ["bf", "bfw, split", "zb-v, v"]
    check("demo", DEMO[target.name].tolerance, ranks, methods, target, record_property)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_larger_gpt_over_zmq(ranks: int, target: Target, record_property: Any) -> None:
    check("large", LARGE[target.name].tolerance, ranks, ["bf"], target, record_property)
