"""Lanes that take offers against the rules are caught, by a check each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rrfp.compute.lanes.thread import ThreadLane
from rrfp.testing.lane_checks import ALL_CHECKS, made_by

CHECKS = {check.__name__: check for check in ALL_CHECKS}


class TakesNone(ThreadLane):
    """Has a slot, and never looks into it."""

    def _take_offer(self) -> None:
        pass


class TakesFirst(ThreadLane):
    """Takes an offer before what is enqueued."""

    def _take_offer(self) -> None:
        assert self.offers is not None
        self._taken = self.offers.pop()


class TakesAlways(ThreadLane):
    """Takes an offer after a failed call too."""

    def _run(self, call: Any, future: Any, loop: Any) -> None:
        def attempt() -> Any:
            try:
                return call()
            except BaseException:
                self._take_offer()
                raise

        super()._run(attempt, future, loop)


class Copies(ThreadLane):
    """Makes the offered call, and leaves it in the slot."""

    def _take_offer(self) -> None:
        super()._take_offer()
        taken: Any = self._taken
        if taken is not None and self.offers is not None:
            self.offers._offered.append(taken)


class KeepsIt(ThreadLane):
    """Leaves an offer where it is when it is closed."""

    def close(self, last: Callable[[], object] | None = None) -> None:
        slot, self.offers = self.offers, None
        super().close(last)
        self.offers = slot


@pytest.mark.allow_blocking("a check stops the loop")
@pytest.mark.parametrize(
    ("lane", "check", "message"),
    [
        (TakesNone, "check_offered_call_follows_without_the_loop", "did not make the offered call"),
        (TakesFirst, "check_enqueued_calls_come_before_an_offered_one", "these calls ran"),
        (TakesAlways, "check_withdrawn_and_failed", "after a call that had raised"),
        (Copies, "check_offered_call_is_withdrawn_or_made", "a withdrawn call was made"),
        (KeepsIt, "check_closed_lane_takes_no_offer", "still holds the offered call"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
async def test_a_wrong_lane_fails_a_check(
    lane: type[ThreadLane], check: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rrfp.testing.lane_checks.calls.PATIENCE_S", 0.5)
    with pytest.raises(AssertionError, match=message):
        await CHECKS[check](made_by(lambda stage: lane()))
