"""The call that a rank is in, and when anything last happened in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rrfp.core.tasks import StepId


class RankActivity:
    """Follows the calls of a rank's caller: steps, and collective calls between two steps.

    Every rank makes the same calls in the same order. Other parts of a rank read the attributes; only the methods
    change them.

    Attributes:
        step: the step that the rank is in, until it has the reports of all ranks; None between steps.
        training_step: the number of that step, or of the last one, as people count: training steps before it.
        has_returned: the call of that step has returned, and no caller waits for the reports.
        steps_ended: steps that it has completed.
        gathering: the collective call between two steps that it is in, such as ``clip_grad_norm_``; empty if none.
        gatherings_ended: collective calls between steps that it has completed.
        active_at: when anything last happened, in seconds of the clock ``now``.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.step: StepId | None = None
        self.training_step = 0
        self.has_returned = False
        self.steps_ended = 0
        self.gathering = ""
        self.gatherings_ended = 0
        self.active_at = 0.0
        self._now = now

    def begin_step(self, step: StepId, training_step: int = 0) -> None:
        """The caller began ``step``, before which there were so many training steps."""
        self.step, self.training_step = step, training_step
        self.touch()

    def return_step(self) -> None:
        """The rank has done its part of the step, and the caller goes on."""
        self.has_returned = True

    def await_reports(self) -> None:
        """A caller waits for the reports of the step."""
        if self.step is not None and self.has_returned:
            self.has_returned = False
            self.touch()

    def end_step(self) -> None:
        """The step has ended on all ranks."""
        self.step = None
        self.has_returned = False
        self.steps_ended += 1

    @contextmanager
    def gather(self, call: str) -> Iterator[int]:
        """In here the rank takes part in ``call``, which all ranks make between two steps; yields its number."""
        self.touch()
        self.gathering = call
        yield self.gatherings_ended  # what raises in there ends the pipeline, so there is nothing to take back
        self.gathering = ""
        self.gatherings_ended += 1

    def touch(self) -> None:
        """Something happened."""
        self.active_at = self._now()
