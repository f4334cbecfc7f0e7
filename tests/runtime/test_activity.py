"""A rank's place in its steps, as stall reports show it."""

from __future__ import annotations

from rrfp.model.tasks import Mode, StepId
from rrfp.runtime.context import RankActivity


def test_a_step_after_one_whose_call_had_returned_has_not_returned() -> None:
    activity = RankActivity(lambda: 0.0)
    seen = []
    for number in range(2):
        activity.begin_step(StepId(number, Mode.TRAIN, 1))
        seen.append(activity.has_returned)
        activity.return_step()
        seen.append(activity.has_returned)
        activity.end_step()
    assert seen == [False, True] * 2
    assert activity.steps_ended == 2
