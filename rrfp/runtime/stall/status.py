"""The status of a rank, and what the statuses of all ranks mean. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rrfp.core.usage import Holding
from rrfp.core.waiting import wait_line

#: Stages whose waits are reported when messages are in flight for long; in a deep pipeline all the others wait as well.
_MOST_NAMED = 8

#: Stacks that one line is followed by.
_MOST_STACKS = 4


@dataclass(frozen=True, slots=True)
class StepStatus:
    """The step that a rank is in."""

    #: ``train`` or ``forward``.
    mode: str
    #: Tasks of the step that were enqueued on this rank.
    enqueued: int
    tasks: int
    #: Tasks that may be enqueued now.
    ready: int
    holding: Holding
    #: The most chunk tasks that it may hold; None: any.
    slots: int | None
    #: The most bytes that it may hold; None: any.
    limit_bytes: int | None


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One rank's answer."""

    stage: int
    #: The step that it is in, or None between steps.
    step: int | None
    steps_ended: int
    #: The task, or other work, on its lane, or None.
    running: str | None
    running_s: float
    #: a task is ready and about to be enqueued.
    can_run: bool
    #: Tasks completed since the start.
    completed: int
    #: Messages of a step (tensors, credits) sent since the start.
    sent: int
    #: Messages of a step received since the start.
    received: int
    #: What it waits for, one line a task.
    awaits: tuple[str, ...] = ()
    #: The call of all ranks between two steps that it is in, such as ``clip_grad_norm_``; empty if none.
    gathering: str = ""
    gatherings_ended: int = 0
    #: Its display name; empty where that is its stage.
    name: str = ""
    process: str = ""
    #: The Python stack of its lane, where it has been running something for long.
    stack: str = ""
    #: Its call of the step has returned, and no caller there waits for the reports of the others.
    has_returned: bool = False
    #: Inside a step, the cause for which its lane is idle; empty while it runs something.
    waits_for: str = ""
    waits_s: float = 0.0
    #: The number of the step that it is in, or was in last, as people count.
    training_step: int = 0
    #: The step that it is in; None between steps.
    current: StepStatus | None = None
    #: When it answered, in seconds of its own clock.
    at: float = 0.0
    #: What happened so far to the first task that it waits for; empty if nothing did.
    story: str = ""

    @property
    def who(self) -> str:
        return self.name or f"stage {self.stage}"

    @property
    def progress(self) -> tuple[int, int, int, int]:
        """Changes whenever anything happens on the rank."""
        return (self.steps_ended, self.completed, self.sent, self.received)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all answers mean."""

    #: Nothing will ever happen again.
    deadlock: bool
    #: False if the verdict needs a second round of statuses.
    certain: bool
    #: One line that names the rank for which all others wait, and its lane's task; for a deadlock the report.
    text: str


def judge(statuses: Sequence[RankStatus], before: Sequence[RankStatus] | None) -> Verdict:
    """Tell a slow rank from a deadlock, by the statuses of all ranks, and those ``before`` if they were asked twice.

    Statuses are not of one instant. Two rounds between which no rank made progress are: if then all ranks are idle
    inside the step and every message that was sent was received, nothing is left that could wake any of them. Once
    every task of the step has run there is nothing to wait for but the exchange of results, which needs no task.
    """
    if (crossed := _crossed(statuses)) is not None:
        return Verdict(True, True, crossed)
    if all(status.step is None for status in statuses):
        return Verdict(False, True, _between_steps(statuses))
    reasons = [reason for status in statuses if (reason := _busy(status))]
    current = max((status.step for status in statuses if status.step is not None), default=None)
    reasons += [_elsewhere(status, current) for status in statuses if status.step != current]
    in_flight = sum(status.sent for status in statuses) - sum(status.received for status in statuses)
    if in_flight:
        reasons.append(f"{in_flight} message(s) are in flight")
        if len(reasons) == 1:  # no rank is busy, so some rank waits for one of these messages
            waiting = [status for status in statuses if status.awaits][:_MOST_NAMED]
            reasons += [wait_line(status.who, status.awaits, ", ") for status in waiting]
    if reasons:
        stacks = [f"{status.who} is in:\n{status.stack}" for status in statuses if status.stack][:_MOST_STACKS]
        return Verdict(False, True, "\n".join(["; ".join(reasons), *stacks]))
    if not any(status.awaits for status in statuses):
        return Verdict(False, True, "every task has run, and the ranks are ending the step")
    if before is None or [s.progress for s in before] != [s.progress for s in statuses]:
        return Verdict(False, False, "every rank is idle")
    lines = [f"  {wait_line(s.who, s.awaits)}{s.story and f'. {s.story}'}{_process(s)}" for s in statuses]
    head = f"deadlock in step {current}: every rank is idle and nothing is in flight"
    return Verdict(True, True, "\n".join([head, *lines]))


def _crossed(statuses: Sequence[RankStatus]) -> str | None:
    """Two ranks that wait for all ranks in different calls: both wait forever.

    Neither has taken part in the other's call: it would have been counted.
    """
    for status in statuses:
        for other in statuses:
            if not status.gathering or status.gatherings_ended != other.gatherings_ended:
                continue
            if status.steps_ended == other.step:
                where = f"{other.who} is in step {other.step}, {status.who} is in {status.gathering} before that step"
            elif other.gathering and other.gathering != status.gathering:
                where = f"{status.who} is in {status.gathering}, {other.who} is in {other.gathering}"
            else:
                continue
            return f"deadlock: {where}: every rank must make the same calls in the same order"
    return None


def _between_steps(statuses: Sequence[RankStatus]) -> str:
    """The ranks for which the others wait in a call of all ranks, or no rank waits."""
    call = next((status.gathering for status in statuses if status.gathering), "")
    absent = [status.who for status in statuses if not status.gathering]
    if call and absent:
        return f"{call} was not called yet on {', '.join(absent)}"
    return "; ".join(reason for status in statuses if (reason := _busy(status))) or "no rank is in a step"


def _process(status: RankStatus) -> str:
    return f" [{status.process}]" if status.process else ""


def _busy(status: RankStatus) -> str | None:
    if status.running is not None:
        return f"{status.who} has been running {status.running} for {status.running_s:.1f} s{_process(status)}"
    return f"{status.who} is about to start a task" if status.can_run else None


def _elsewhere(status: RankStatus, current: int | None) -> str:
    where = "its program has not called step() yet" if status.step is None else f"it is still in step {status.step}"
    where = f"it is in {status.gathering}" if status.gathering else where
    return f"{status.who} is not in step {current}: {where}"


@dataclass(frozen=True, slots=True)
class RankAnswer:
    """The answer of one rank, or why there is none."""

    rank: int
    stage: int
    name: str
    #: Its answer; None where none came in time.
    status: RankStatus | None
    #: Why none came; empty where it came.
    absent: str


@dataclass(frozen=True, slots=True)
class JobStatus:
    """All ranks, at about one time."""

    asker: int
    answers: tuple[RankAnswer, ...]
