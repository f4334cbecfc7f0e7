"""Deliberately wrong lanes are caught: by a check each, and by a training over the device double."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from compute import wrong_lanes
from runtime.toys import TOLERANCE, data, expect, largest_difference, loss_fn, stages
from torch import nn

import rrfp
from rrfp.compute.lanes.stream import StreamLane
from rrfp.lab.device_double import DoubleDevice
from rrfp.testing.lane_checks import ALL_CHECKS

CHECKS = {check.__name__: check for check in ALL_CHECKS}

CAUGHT = [
    (wrong_lanes.CompleteAtReturn, "check_complete_means_complete", "before the device had run"),
    (wrong_lanes.NoFence, "check_fence", "before work that its caller had issued"),
    (wrong_lanes.NoAdopt, "check_adopt", "freed before it was complete"),
    (wrong_lanes.NoHandOver, "check_hand_over", "freed before it was complete"),
    (wrong_lanes.ManyStreams, "check_later_calls_see_earlier_results", "did not see the result"),
    (wrong_lanes.WaitsForDevice, "check_depth", "never pending at once"),
    (wrong_lanes.NamesLast, "check_late_error", "later calls failed with"),
    (wrong_lanes.KeepsResult, "check_nothing_outlives_completion", "its outcome still lived"),
    (wrong_lanes.WaitsInClose, "check_close_does_not_wait", "close waited for the running call"),
    (wrong_lanes.WrongOrder, "check_order", "in another order"),
]


@pytest.mark.allow_blocking("one of the lanes waits in close")
@pytest.mark.parametrize(("lane", "check", "message"), CAUGHT, ids=lambda value: getattr(value, "__name__", None))
async def test_a_wrong_lane_fails_a_check(
    lane: type[StreamLane], check: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for home in ("checks", "lane_checks.subject"):
        monkeypatch.setattr(f"rrfp.testing.{home}.PATIENCE_S", 2.0)

    async def repeated() -> None:
        for _ in range(3):  # a busy host may be later than the device, which then has nothing to find
            await CHECKS[check](wrong_lanes.subject_with(lane))

    with pytest.raises(AssertionError, match=message):
        await repeated()


def train(lane: type[StreamLane]) -> tuple[list[nn.Module], list[nn.Module], list[str]]:
    """Two steps on two stages; before each, the caller changes parameters on its stream. Actual, expected, problems."""
    actual, expected = stages(2), stages(2)
    batch, seconds = data(4), 0.002
    with DoubleDevice(lambda count: seconds) as device:
        with rrfp.local(actual, loss_fn=loss_fn, lane=lambda stage: lane(device, depth=2)).blocking() as pipe:
            for number in range(2):
                for modules in (actual, expected):
                    for parameter in (p for module in modules for p in module.parameters()):
                        parameter.grad = None
                seconds = 0.2  # so that a task without a fence comes before it, however late the host is
                with torch.no_grad(), device.current_stream().issuing():
                    for parameter in (p for module in actual for p in module.parameters()):
                        parameter.mul_(1.5)
                seconds = 0.002
                with torch.no_grad():
                    for parameter in (p for module in expected for p in module.parameters()):
                        parameter.mul_(1.5)
                result = pipe.step(batch.inputs, batch.targets)
                wanted = expect(expected, batch, step=number)
                if not math.isclose(result.loss or math.nan, wanted.loss or 0.0, rel_tol=1e-5):
                    return actual, expected, [f"the loss is {result.loss}, must be {wanted.loss}", *device.problems]
        return actual, expected, device.problems


def test_the_right_lane_trains() -> None:
    actual, expected, problems = train(StreamLane)
    assert largest_difference(actual, expected) < TOLERANCE
    assert problems == []


@pytest.mark.parametrize(
    ("lane", "message"),
    [
        (wrong_lanes.CompleteAtReturn, "the loss is nan"),
        (wrong_lanes.NoFence, "the loss is nan"),
        (wrong_lanes.NoAdopt, "freed before it was complete"),
        (wrong_lanes.ManyStreams, "without waiting for it"),
    ],
)
def test_a_training_on_a_wrong_lane_is_wrong_or_a_race(lane: Any, message: str) -> None:
    *_, problems = train(lane)
    assert any(message in problem for problem in problems), problems
