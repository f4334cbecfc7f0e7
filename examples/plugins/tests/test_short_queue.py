"""The hint keeps the contract of hints, and feeds the next stage exactly while its queue is short."""

from __future__ import annotations

import numpy as np
import pytest
from rrfp_plugin_example import ShortQueue

from rrfp.costs import CostTable
from rrfp.lab.simulation import simulate
from rrfp.testing.hint_checks import ALL_CHECKS, Check


@pytest.mark.parametrize("check", ALL_CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Check) -> None:
    check(ShortQueue)


#: Forwards of stage 0 take 10 s, all other tasks 1 s: whenever a forward of it ends, the gradient of the one before is
#: back, and reports every output consumed but the newest.
SLOW_FIRST_STAGE = CostTable(
    stages=2,
    chunks=1,
    placement="looped",
    microbatches=4,
    forward=np.array([[10.0] * 4, [1.0] * 4]),
    backward=np.ones((2, 4)),
    weight=None,
    latency_forward=np.zeros((1, 4)),
    latency_backward=np.zeros((1, 4)),
)


@pytest.mark.parametrize(
    ("enough", "order"),
    [
        (1, "F0 F1 B0 F2 B1 F3 B2 B3"),  # one output waits: that is enough
        (2, "F0 F1 F2 F3 B0 B1 B2 B3"),
    ],
)
def test_forwards_come_first_while_fewer_outputs_wait_downstream(enough: int, order: str) -> None:
    simulation = simulate(SLOW_FIRST_STAGE, hint=lambda: ShortQueue(enough), limit=4)
    assert simulation.to_json()["order"][0] == [f"{task}@0" for task in order.split()]


def test_the_last_stage_has_no_queue_to_feed() -> None:
    simulation = simulate(SLOW_FIRST_STAGE, hint=ShortQueue, limit=4)
    assert [task[0] for task in simulation.to_json()["order"][1]] == list("FBFBFBFB")
