"""The rows of `rrfp top`: one for each rank, from its status now and the one before. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rrfp.runtime.stall.status import JobStatus, RankAnswer, RankStatus


@dataclass(frozen=True, slots=True)
class TopRow:
    """One rank. What is not known, or does not apply, is None or empty."""

    #: Which.
    rank: int
    stage: int
    name: str
    #: ``running``, ``starting`` (a task), ``waiting``, ``ending`` (the step), ``between steps``, or why it gave no
    #: answer.
    state: str
    #: How long it has been running or waiting.
    seconds: float | None = None
    #: The number of its step, or of its last one: training steps before it.
    step: int | None = None
    #: Of the step that it is in: ``train`` or ``forward``.
    mode: str | None = None
    #: The task, or other work, on its lane.
    running: str | None = None
    #: Why its lane is idle inside a step: ``input``, ``memory``, ``order``, ``choice`` or ``drained``.
    cause: str | None = None
    #: The first of ``awaits``, or the call of all ranks that it is in.
    waits_for: str = ""
    #: Tasks that have not started, each with the reason, the lowest microbatch first.
    awaits: tuple[str, ...] = ()
    #: Tasks of the step that were started.
    enqueued: int | None = None
    #: All of them.
    tasks: int | None = None
    #: Microbatches in work, in chunk tasks.
    held: int | None = None
    #: The limit on ``held``.
    limit: int | None = None
    #: The memory of these.
    held_bytes: int | None = None
    #: The limit on ``held_bytes``.
    limit_bytes: int | None = None
    #: Tasks that may start now.
    ready: int | None = None
    #: Outputs of other stages that have arrived and whose task has not started.
    received: int | None = None
    #: Their bytes.
    received_bytes: int | None = None
    #: Since the last row.
    tasks_per_s: float | None = None
    #: Since the last row.
    steps_per_s: float | None = None
    process: str = ""
    #: The Python stack of its lane, where it has been running something for `stall_after` seconds.
    stack: str = ""


def rows(survey: JobStatus, before: JobStatus | None) -> list[TopRow]:
    """A row for each rank; rates count from ``before``."""
    earlier: Sequence[RankAnswer | None] = () if before is None else before.answers
    if len(earlier) != len(survey.answers):
        earlier = [None] * len(survey.answers)
    return [_row(now, then) for now, then in zip(survey.answers, earlier, strict=True)]


def _row(answer: RankAnswer, earlier: RankAnswer | None) -> TopRow:
    status, then = answer.status, None if earlier is None else earlier.status
    if status is None:
        return TopRow(answer.rank, answer.stage, answer.name, answer.absent)
    state, seconds, waits_for = _doing(status)
    now = status.current
    holding = None if now is None else now.holding
    return TopRow(
        answer.rank,
        answer.stage,
        answer.name,
        state,
        seconds,
        step=status.training_step if status.step is not None or status.steps_ended else None,
        mode=None if now is None else now.mode,
        running=status.running,
        cause=status.waits_for or None,
        waits_for=waits_for,
        awaits=status.awaits,
        enqueued=None if now is None else now.enqueued,
        tasks=None if now is None else now.tasks,
        held=None if holding is None else holding.held,
        limit=None if now is None else now.slots,
        held_bytes=None if holding is None else holding.num_bytes,
        limit_bytes=None if now is None else now.limit_bytes,
        ready=None if now is None else now.ready,
        received=None if holding is None else holding.received,
        received_bytes=None if holding is None else holding.received_bytes,
        tasks_per_s=None if then is None else _rate(then.completed, status.completed, status.at - then.at),
        steps_per_s=None if then is None else _rate(then.steps_ended, status.steps_ended, status.at - then.at),
        process=status.process,
        stack=status.stack,
    )


def _doing(status: RankStatus) -> tuple[str, float | None, str]:
    """The state, for how long, and what it waits for."""
    if status.running is not None:
        return "running", status.running_s, ""
    if status.gathering:
        return "waiting", None, f"all ranks in {status.gathering}"
    if status.step is None or status.has_returned:
        return "between steps", None, ""
    if status.can_run:
        return "starting", None, ""
    if status.awaits:
        return "waiting", status.waits_s if status.waits_for else None, status.awaits[0]
    return "ending", None, "the reports of all ranks"


def _rate(before: int, now: int, seconds: float) -> float | None:
    """None where that is no time, or the counters are another process's."""
    return (now - before) / seconds if seconds > 0 and now >= before else None
