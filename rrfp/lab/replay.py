"""A recorded core, replayed: a new one gets the same events, and comes to the same state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rrfp.core import events as ev
from rrfp.core.event_history import EventHistory, StepEvents
from rrfp.core.hint import Hint, View
from rrfp.core.ready_set import ReadySet
from rrfp.core.stage_core import StageCore
from rrfp.errors import HintError, RrfpError
from rrfp.model.tasks import Task
from rrfp.trace.event_log import Recording


class _Recorded(Hint):
    """Takes and orders steps as the recorded hint did. It never chooses: tasks were enqueued."""

    def __init__(self, steps: Iterable[StepEvents], *, may_wait: bool) -> None:
        self._steps = iter(steps)
        self._step: StepEvents | None = None
        self.may_wait = may_wait

    def open_step(self, view: View) -> None:
        self._step = next(self._steps, None)
        if self._step is None or not self._step.is_open:
            raise HintError(f"hint {type(self).__name__} refused the step")

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        raise NotImplementedError("a replayed core decides nothing")

    def microbatch_order(self, view: View) -> Sequence[int] | None:
        return None if self._step is None else self._step.order

    def awaits(self, task: Task, view: View) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Refusal:
    """An event that the core refused, as it did in the recorded run."""

    #: Its number among all events, from 0.
    number: int
    event: ev.Event
    error: RrfpError


def replay(recording: Recording) -> tuple[StageCore, tuple[Refusal, ...]]:
    """A core that got all events, and those that it refused."""
    # Of the same name, for those who read what a hint does not choose.
    hint = type(recording.hint, (_Recorded,), {})(recording.steps, may_wait=recording.may_wait)
    core = StageCore(
        recording.graph,
        recording.stage,
        hint,
        recording.limit,
        group=recording.group,
        in_order=recording.in_order,
        history=EventHistory(),
    )
    if recording.steps:
        core.recall(recording.steps[0].known)
    refused = []
    for number, event in enumerate(recording.events):
        try:
            core.apply(event)
        except RrfpError as error:
            refused.append(Refusal(number, event, error))
    return core, tuple(refused)
