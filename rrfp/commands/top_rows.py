"""The rows of `rrfp top`: one for each rank, from its status now and the one before. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rrfp.runtime.stall.answers import RankAnswer, Survey
from rrfp.runtime.stall.status import RankStatus


@dataclass(frozen=True, slots=True)
class Row:
    """One rank. What is not known, or does not apply, is None or empty.

    Attributes:
        rank: which.
        stage: its stage.
        name: its display name.
        state: ``running``, ``starting`` (a task), ``waiting``, ``ending`` (the step), ``between steps``, or why it gave
            no answer.
        seconds: how long it has been running or waiting.
        step: the number of its step, or of its last one: training steps before it.
        mode: of the step that it is in: ``train`` or ``forward``.
        running: the task, or other work, on its lane.
        cause: why its lane is idle inside a step: ``input``, ``memory``, ``order``, ``choice`` or ``drained``.
        waits_for: the first of ``awaits``, or the call of all ranks that it is in.
        awaits: tasks that have not started, each with the reason, the lowest microbatch first.
        enqueued: tasks of the step that were started.
        tasks: all of them.
        held: microbatches in work, in chunk tasks.
        limit: of ``held``.
        held_bytes: the memory of these.
        limit_bytes: of ``held_bytes``.
        ready: tasks that may start now.
        received: outputs of other stages that have arrived and whose task has not started.
        received_bytes: their bytes.
        tasks_per_s: since the last row.
        steps_per_s: since the last row.
        process: its host and process id.
        stack: the Python stack of its lane, where it has been running something for `stall_after` seconds.
    """

    rank: int
    stage: int
    name: str
    state: str
    seconds: float | None = None
    step: int | None = None
    mode: str | None = None
    running: str | None = None
    cause: str | None = None
    waits_for: str = ""
    awaits: tuple[str, ...] = ()
    enqueued: int | None = None
    tasks: int | None = None
    held: int | None = None
    limit: int | None = None
    held_bytes: int | None = None
    limit_bytes: int | None = None
    ready: int | None = None
    received: int | None = None
    received_bytes: int | None = None
    tasks_per_s: float | None = None
    steps_per_s: float | None = None
    process: str = ""
    stack: str = ""


def rows(survey: Survey, before: Survey | None) -> list[Row]:
    """A row for each rank; rates count from ``before``."""
    earlier: Sequence[RankAnswer | None] = [None] * len(survey.answers) if before is None else before.answers
    return [_row(now, then) for now, then in zip(survey.answers, earlier, strict=True)]


def _row(answer: RankAnswer, earlier: RankAnswer | None) -> Row:
    status, then = answer.status, None if earlier is None else earlier.status
    if status is None:
        return Row(answer.rank, answer.stage, answer.name, answer.absent)
    state, seconds, waits_for = _doing(status)
    now = status.current
    holding = None if now is None else now.holding
    return Row(
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
