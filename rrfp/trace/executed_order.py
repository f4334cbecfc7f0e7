"""The executed order of a logged step, read from the event logs of its ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from rrfp.core import events as ev
from rrfp.errors import ConfigError
from rrfp.model.tasks import Mode, Task
from rrfp.model.topology import Topology
from rrfp.model.visits import Visits
from rrfp.schedules.executed import ExecutedSchedule
from rrfp.trace.event_log import EventLog, log_path, read_event_log


def read_executed(folder: str | os.PathLike[str], topology: Topology | None = None) -> ExecutedSchedule:
    """The newest training step that all stages have run whole, by the logs that ``event_log=`` wrote to ``folder``.

    It takes the log of each stage of one replica, and in it of one member of the group: those of the rank ``topology``,
    or of rank 0. A ConfigError says what the logs lack, or how they differ.
    """
    if topology is None:
        topology = read_event_log(log_path(folder, 0)).topology
    name = os.fspath(folder)
    logs = [_log(folder, topology, stage) for stage in range(topology.stages)]
    for stage, log in enumerate(logs):
        if log.recording.graph != logs[0].recording.graph:
            raise ConfigError(f"replay {name}: the logs of stages 0 and {stage} are of different pipelines")
    steps = [_training_steps(log) for log in logs]
    number = _newest_whole(name, logs, steps)
    opened = [step for step, _ in (own[number] for own in steps)]
    for stage, step in enumerate(opened):
        if (step.microbatches, step.visits) != (opened[0].microbatches, opened[0].visits):
            raise ConfigError(f"replay {name}: step {number} is another one in the logs of stages 0 and {stage}")
    return ExecutedSchedule(
        f"{name}, step {number}", logs[0].recording.graph, _visits(opened[0]), tuple(own[number][1] for own in steps)
    )


def _log(folder: str | os.PathLike[str], topology: Topology, stage: int) -> EventLog:
    rank = topology.rank_of(stage)
    path = log_path(folder, rank)
    log = read_event_log(path)
    place, there = topology.place_of(rank), log.topology
    own = (*place, topology.world)
    logged = (there.stage, there.replica, there.member, there.world)
    if own != logged:
        names = ("stage", "replica", "member", "number of ranks")
        what, now, then = next(each for each in zip(names, own, logged, strict=True) if each[1] != each[2])
        raise ConfigError(f"replay {os.fspath(folder)}: {what} of rank {rank} is {now}, was {then} in {path}")
    return log


def _training_steps(log: EventLog) -> Mapping[int, tuple[ev.StepOpened, tuple[Task, ...]]]:
    """By number, the training steps of a log, each with the tasks that began."""
    return {
        step.known.step: (opened, tuple(event.task for event in step.events if isinstance(event, ev.Enqueued)))
        for step in log.recording.steps
        for opened in step.events[:1]
        if step.is_open and isinstance(opened, ev.StepOpened) and opened.mode is Mode.TRAIN
    }


def _visits(opened: ev.StepOpened) -> Visits:
    return Visits(opened.microbatches) if opened.visits is None else opened.visits


def _newest_whole(
    name: str, logs: Sequence[EventLog], steps: Sequence[Mapping[int, tuple[ev.StepOpened, tuple[Task, ...]]]]
) -> int:
    common = set(steps[0]).intersection(*steps)
    missed = ""
    for number in sorted(common, reverse=True):
        missing = [
            (stage, task)
            for stage, (log, own) in enumerate(zip(logs, steps, strict=True))
            for task in _not_begun(log, *own[number])
        ]
        if not missing:
            return number
        stage, task = missing[0]
        missed = missed or f": in step {number} stage {stage} had not begun {task}"
    if not common:
        have = "; ".join(f"stage {stage} {', '.join(map(str, own)) or 'none'}" for stage, own in enumerate(steps))
        missed = f": the training steps in its logs are {have}"
    raise ConfigError(f"replay {name}: its logs have no training step that all stages have run whole{missed}")


def _not_begun(log: EventLog, opened: ev.StepOpened, began: Sequence[Task]) -> list[Task]:
    visits, known = _visits(opened), frozenset(began)
    tasks = log.recording.graph.tasks(log.recording.stage, visits.microbatches)
    missing = (task for task in tasks if visits.exists(task) and task not in known)
    return sorted(missing, key=lambda task: (task.microbatch, task.virtual_stage, task.kind))
