"""The event log of a rank as a file: the events of its core in the current and the last step, and its state then.

    {"rrfp events": 1, "rank": 1, "mesh": {...}, "job": "...", "why": "...", "stage": 1, "graph": {...}, ...}
    {"known": {"step": 6, ...}, "open": true, "order": null}     a step begins: what the core knew before it
    ["StepOpened", 6, "train", 4, null, null, null, null, null, null] an event: its name, and its fields in order
    ["Arrived", [6, "train", 4], "F0@0", 4096, null]
    {"state": {...}}                                                  what came of them

One JSON value a line. Signatures of forwards, which may be anything hashable, are numbers: equal ones have the same.
`read_executed` reads the order in which a step ran, from the logs of its ranks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

from rrfp.atomic_files import write_atomically
from rrfp.core import events as ev
from rrfp.core.event_history import Known, StepEvents
from rrfp.core.group_step import GroupMembership
from rrfp.core.ready_set import ForcedOrder
from rrfp.core.stage_core import StageCore
from rrfp.core.waiting import state_of
from rrfp.errors import ConfigError, Origin
from rrfp.laboratory import METHODS, load
from rrfp.memory.admission import Limit
from rrfp.memory.measured import Largest, Measured, Spent
from rrfp.model.graph import TaskGraph
from rrfp.model.mesh import Mesh
from rrfp.model.placement import Placement, TablePlacement
from rrfp.model.tasks import Kind, Mode, StepId, Task
from rrfp.model.topology import Topology
from rrfp.model.visits import Visits
from rrfp.plain import flag, number, or_none, shown, text, whole
from rrfp.schedules.executed import ExecutedSchedule

FORMAT, VERSION = "rrfp events", 1


@dataclass(frozen=True, slots=True)
class Recording:
    """One core, and its events in the current and the last step."""

    graph: TaskGraph
    stage: int
    limit: Limit
    group: GroupMembership
    in_order: tuple[ForcedOrder, ...]
    #: The hint's class, for people.
    hint: str
    #: Whether the hint may choose nothing although tasks are ready.
    may_wait: bool
    #: Oldest first.
    steps: tuple[StepEvents, ...]

    @classmethod
    def of(cls, core: StageCore) -> Recording:
        steps = () if core.history is None else core.history.steps
        hint, forced = core.hint, tuple(sorted(core.in_order))
        return cls(core.graph, core.stage, core.limit, core.group, forced, type(hint).__name__, hint.may_wait, steps)

    @property
    def events(self) -> tuple[ev.Event, ...]:
        return tuple(event for step in self.steps for event in step.events)

    def replay(self) -> tuple[StageCore, tuple[Any, ...]]:
        """A core that got all events, and those that it refused, as `rrfp.lab.replay.Refusal` has them."""
        replayed: tuple[StageCore, tuple[Any, ...]] = load(METHODS["Recording.replay"])(self)
        return replayed


@dataclass(frozen=True, slots=True)
class EventLog:
    """What a rank wrote."""

    topology: Topology
    #: Names the pipeline among all that run at any time, equal on all its ranks; None before they have met.
    job: str | None
    #: What happened then, in words.
    why: str
    recording: Recording
    #: As `rrfp.core.waiting.state_of` has it.
    state: Mapping[str, Any]


def log_path(folder: str | os.PathLike[str], rank: int) -> Path:
    """Where the log of ``rank`` is; a later one replaces it."""
    return Path(folder) / f"events-rank{rank}.jsonl"


def make_log_folder(folder: str | os.PathLike[str]) -> None:
    """Before there is anything to write: a ConfigError if nothing can be written there."""
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"event_log is {os.fspath(folder)!r}: cannot be made ({error.strerror or error})") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"event_log is {os.fspath(folder)!r}: cannot be written to (not allowed)")


def write_event_log(
    folder: str | os.PathLike[str], topology: Topology, core: StageCore, why: str, job: str | None = None
) -> Path:
    """Write what ``core`` has kept; a ConfigError if that is impossible."""
    path = log_path(folder, topology.rank)
    write_atomically(path, (f"{json.dumps(line)}\n" for line in _lines(topology, core, why, job)))
    return path


def _lines(topology: Topology, core: StageCore, why: str, job: str | None) -> Iterator[Any]:
    recording, numbers = Recording.of(core), dict[Hashable, int]()

    def numbered(signature: Hashable) -> int | None:
        return None if signature is None else numbers.setdefault(signature, len(numbers))

    def plain_event(event: ev.Event) -> list[Any]:
        if isinstance(event, ev.Previewed):
            event = replace(event, signature=numbered(event.signature))
        return [type(event).__name__, *(_plain(getattr(event, field.name)) for field in fields(event))]

    def plain_known(known: Known) -> dict[str, Any]:
        sizes = known.sizes and {
            mode: [
                {**step, "of_signature": [[c, numbered(s), b] for c, s, b in step["of_signature"]]} for step in steps
            ]
            for mode, steps in known.sizes.items()
        }
        measured = [asdict(each) for each in known.measured]
        return {"step": known.step, "measured": measured, "sizes": sizes, "early": [*map(plain_event, known.early)]}

    where = {"rank": topology.rank, "mesh": asdict(topology.mesh)}
    yield {FORMAT: VERSION, **where, "job": job, "why": why, **_plain_core(recording)}
    for step in recording.steps:
        yield {"known": plain_known(step.known), "open": step.is_open, "order": step.order}
        yield from map(plain_event, step.events)
    yield {"state": state_of(core)}


def _plain_core(recording: Recording) -> dict[str, Any]:
    graph, limit, group = recording.graph, recording.limit, recording.group
    placement = graph.placement
    return {
        "stage": recording.stage,
        "graph": {
            "placement": asdict(placement) if isinstance(placement, Placement) else [*graph.stage_of],
            "edges": graph.edges,
            "split": graph.split,
            "names": graph.names,
        },
        "limit": [limit.microbatches, limit.bytes, limit.rule],
        "group": [group.member, group.size],
        "in_order": [f"{kind}@{v}" for kind, v in recording.in_order],
        "hint": recording.hint,
        "may_wait": recording.may_wait,
    }


def _plain(value: Any) -> Any:
    match value:
        case Task():
            return str(value)
        case Enum():
            return value.value
        case StepId():
            return [value.number, value.mode.value, value.microbatches]
        case Visits():
            return [value.microbatches, [sorted(skipped) for skipped in value.skipped]]
        case Origin():
            return [value.stage, value.task, value.cause, value.rank]
        case ev.Pool():
            return [value.copy, value.copies, [*value.homes], value.depth, [*value.paces], value.is_even]
    return value


# Reading. Whatever is wrong with a line is an error that names it.


def read_event_log(path: str | os.PathLike[str]) -> EventLog:
    """Read what `write_event_log` wrote; a ConfigError names the line that cannot be read."""
    name = os.fspath(path)
    line = 0
    try:
        with open(path, encoding="utf-8") as file:
            lines = list(file)
        head = _head(lines[0] if lines else "")
        steps: list[StepEvents] = []
        state: Mapping[str, Any] | None = None
        for content in lines[1:]:
            line += 1
            match json.loads(content):
                case [str(event), *values] if steps and state is None:
                    steps[-1].events.append(_event(event, values))
                case {"known": dict(known), "open": bool(is_open), "order": order} if state is None:
                    steps.append(StepEvents(_known(known), [], is_open, None if order is None else tuple(order)))
                case {"state": dict(state)}:
                    pass
                case other:
                    raise ValueError(f"{shown(other)} is not expected here")
        if state is None:
            raise ValueError("the log ends before the state")
        line = 0
        topology, job = _topology(head), or_none(text, "job", head.get("job"))
        return EventLog(topology, job, text("why", head["why"]), _recording(head, tuple(steps)), state)
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read ({error.strerror or error})") from None
    except KeyError as error:
        raise ConfigError(f"{name}: line {line + 1} has no {error}") from None
    except (ConfigError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{name}: line {line + 1} cannot be read: {error!s:.300}") from None


def _head(line: str) -> dict[str, Any]:
    head = json.loads(line) if line else None
    if not isinstance(head, dict) or head.get(FORMAT) != VERSION:
        raise ValueError(f"an event log begins with {FORMAT!r}: {VERSION}")
    return head


def _topology(head: Mapping[str, Any]) -> Topology:
    plain = head["mesh"]
    dims = tuple((text("dim", name), whole(name, size, 1)) for name, size in plain["dims"])
    mesh = Mesh(dims, tuple(plain["coordinate"]), tuple(plain["reduce"]))
    return Topology.at(whole("rank", head["rank"], 0, mesh.size - 1), mesh)


def _recording(head: Mapping[str, Any], steps: tuple[StepEvents, ...]) -> Recording:
    graph, placement = head["graph"], head["graph"]["placement"]
    return Recording(
        TaskGraph(
            Placement(**placement) if isinstance(placement, dict) else TablePlacement(tuple(placement)),
            tuple((u, v) for u, v in graph["edges"]),
            tuple(map(bool, graph["split"])),
            tuple(map(str, graph["names"])),
        ),
        whole("stage", head["stage"]),
        Limit(*head["limit"]),
        GroupMembership(*head["group"]),
        tuple(map(_forced, head["in_order"])),
        text("hint", head["hint"]),
        bool(head["may_wait"]),
        steps,
    )


def _forced(value: str) -> ForcedOrder:
    kind, _, virtual_stage = value.partition("@")
    return Kind(kind), int(virtual_stage)


def _known(plain: Mapping[str, Any]) -> Known:
    measured = [
        Measured(
            each["virtual_stage"],
            tuple(Spent(**spent) for spent in each["durations"]),
            tuple(Largest(**sizes) for sizes in each["training_sizes"]),
            tuple(Largest(**sizes) for sizes in each["evaluation_sizes"]),
        )
        for each in plain["measured"]
    ]
    early = tuple(_event(event, values) for event, *values in plain["early"])
    return Known(whole("step", plain["step"]), tuple(measured), plain["sizes"], early)


def _step_id(field: str, value: Any) -> StepId:
    step, mode, microbatches = value
    return StepId(whole(field, step), Mode(mode), whole(field, microbatches, 1))


def _visits(field: str, value: Any) -> Visits:
    microbatches, skipped = value
    return Visits(whole(field, microbatches), tuple(map(frozenset, skipped)))


def _origin(field: str, value: Any) -> Origin:
    stage, task, cause, rank = value
    return Origin(whole(field, stage), task, text(field, cause), rank)


def _pool(field: str, value: Any) -> ev.Pool:
    copy, copies, homes, depth, paces, is_even = value
    numbers = (whole(field, each, 0) for each in homes)
    seconds = (number(field, each, 0) for each in paces)
    counts = whole(field, copy, 0), whole(field, copies, 1), (*numbers,), whole(field, depth, 1)
    return ev.Pool(*counts, (*seconds,), flag(field, is_even))


#: How a field of each type is read.
_READERS: Mapping[Any, Callable[..., Any]] = {
    int: whole,
    float: number,
    Task: lambda field, value: Task.parse(text(field, value)),
    Mode: lambda field, value: Mode(value),
    StepId: _step_id,
    Visits: _visits,
    Origin: _origin,
    ev.Pool: _pool,
    Hashable: whole,
    tuple[float, ...]: lambda field, value: tuple(number(field, each) for each in value),
    tuple[float | None, ...]: lambda field, value: tuple(_field(field, float | None, each) for each in value),
}
_EVENTS: Mapping[str, type] = {event.__name__: event for event in get_args(ev.Event)}


#: Names in logs of rrfp 0.1, and those of now.
_RENAMED = {"Announced": "BegunReported"}


def _event(name: str, values: Sequence[Any]) -> Any:
    kind = _EVENTS.get(_RENAMED.get(name, name))
    if kind is None:
        raise ValueError(f"event is {shown(name)}, must be one of: {', '.join(_EVENTS)}")
    hints = _fields_of(kind)
    if kind is ev.StepOpened and len(hints) - 4 < len(values) < len(hints):
        # rrfp 0.1 had no limit, no rooms and no pool of a step.
        values = [*values, *[None] * (len(hints) - len(values))]
    if len(values) != len(hints):
        raise ValueError(f"{name} has {len(values)} fields, must have {', '.join(hints)}")
    return kind(*(_field(field, hint, value) for (field, hint), value in zip(hints.items(), values, strict=True)))


def _field(field: str, hint: Any, value: Any) -> Any:
    types = get_args(hint)
    if value is None and (type(None) in types or hint is Hashable):
        return None
    return _READERS[types[0] if type(None) in types else hint](field, value)


@cache
def _fields_of(event: type) -> Mapping[str, Any]:
    return get_type_hints(event)


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
        if log.job != logs[0].job:
            raise ConfigError(
                f"replay {name}: the logs of stages 0 and {stage} are of different runs, must be of one: a killed rank "
                "leaves that of an earlier run"
            )
    steps = [_training_steps(log) for log in logs]
    newest = _newest_whole(name, logs, steps)
    opened = [step for step, _ in (own[newest] for own in steps)]
    for stage, step in enumerate(opened):
        if (step.microbatches, step.visits) != (opened[0].microbatches, opened[0].visits):
            raise ConfigError(f"replay {name}: step {newest} is another one in the logs of stages 0 and {stage}")
    return ExecutedSchedule(
        f"{name}, step {newest}", logs[0].recording.graph, _visits_of(opened[0]), tuple(own[newest][1] for own in steps)
    )


def _log(folder: str | os.PathLike[str], topology: Topology, stage: int) -> EventLog:
    rank = topology.rank_of(stage)
    path = log_path(folder, rank)
    try:
        log = read_event_log(path)
    except ConfigError as error:
        raise ConfigError(f"replay {os.fspath(folder)}: {error}") from None
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


def _visits_of(opened: ev.StepOpened) -> Visits:
    return Visits(opened.microbatches) if opened.visits is None else opened.visits


def _newest_whole(
    name: str, logs: Sequence[EventLog], steps: Sequence[Mapping[int, tuple[ev.StepOpened, tuple[Task, ...]]]]
) -> int:
    common = set(steps[0]).intersection(*steps)
    missed = ""
    for step in sorted(common, reverse=True):
        missing = [
            (stage, task)
            for stage, (log, own) in enumerate(zip(logs, steps, strict=True))
            for task in _not_begun(log, *own[step])
        ]
        if not missing:
            return step
        stage, task = missing[0]
        missed = missed or f": in step {step} stage {stage} had not begun {task}"
    if not common:
        have = "; ".join(f"stage {stage} {', '.join(map(str, own)) or 'none'}" for stage, own in enumerate(steps))
        missed = f": the training steps in its logs are {have}"
    raise ConfigError(f"replay {name}: its logs have no training step that all stages have run whole{missed}")


def _not_begun(log: EventLog, opened: ev.StepOpened, began: Sequence[Task]) -> list[Task]:
    visits, known = _visits_of(opened), frozenset(began)
    tasks = log.recording.graph.tasks(log.recording.stage, visits.microbatches)
    missing = (task for task in tasks if visits.exists(task) and task not in known)
    return sorted(missing, key=lambda task: (task.microbatch, task.virtual_stage, task.kind))
