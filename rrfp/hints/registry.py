"""Hints by name: built in, plugins of the entry point group ``rrfp.hints``, and schedules used as hints."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rrfp.core.hint import Hint, View
from rrfp.core.ready_set import MicrobatchOrder, ReadySet
from rrfp.errors import ConfigError, misspelt
from rrfp.model.schedule import Schedule
from rrfp.model.tasks import Kind, Mode, Task
from rrfp.plugins import Registry, called, name_of, named_or_loaded, where_defined
from rrfp.schedules.csv import CsvSchedule
from rrfp.schedules.executed import ExecutedSchedule
from rrfp.schedules.registry import ScheduleSpec, make_schedule, schedule_names

#: Returns the schedule for the step of a view, with every task of that step, weight tasks included.
ScheduleSource = Callable[[View], Schedule]


class ScheduleHint(Hint):
    """Orders ready tasks by their position in a schedule; never waits."""

    def __init__(self, source: ScheduleSource) -> None:
        self._source = source
        self._order: tuple[Task, ...] = ()
        self._position: dict[Task, int] = {}
        self._is_monotone = True

    def open_step(self, view: View) -> None:
        """Look up the step's order; refuse a schedule that lacks a task."""
        # Tasks of virtual stages that a microbatch skips drop out: the others keep their order, which still ends.
        schedule = self._source(view)
        order, visits = schedule.orders[view.stage], view.visits
        if view.mode is not Mode.TRAIN:
            order = tuple(task for task in order if task.kind is Kind.F)
        self._order = tuple(filter(visits.exists, order)) if visits.are_partial else order
        self._position = {task: position for position, task in enumerate(self._order)}
        for task in view.graph.tasks(view.stage, view.microbatches, view.mode):
            if task not in self._position and visits.exists(task):
                raise ConfigError(f"schedule {schedule.name} misses {task} on stage {view.stage}")
        self._is_monotone = _is_monotone(self._order)

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        # Why only the heads? Looking at a thousand ready tasks takes half a millisecond, and in a schedule that keeps
        # microbatch order no other task can come first.
        candidates = ready.heads() if self._is_monotone else iter(ready)
        return min(candidates, key=self._position.__getitem__)


class Strict(ScheduleHint):
    """Runs a schedule to the letter: waits for its next task, whichever others are ready."""

    may_wait = True

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        due = self._order[view.num_enqueued_total]
        return due if due in ready else None


def _is_monotone(order: Sequence[Task]) -> bool:
    """Whether each kind and virtual stage is in microbatch order."""
    last: dict[tuple[Kind, int], int] = {}
    for kind, microbatch, virtual_stage in order:
        if last.get((kind, virtual_stage), -1) > microbatch:
            return False
        last[kind, virtual_stage] = microbatch
    return True


#: The ``hint`` option: a name, a class or other factory, or an instance, of which every stage gets a copy.
HintSpec = str | Hint | Callable[[], Hint]

#: The hint of `rrfp.Pipeline` and `rrfp simulate` where none is named; docs/hints.md gives the reasons.
DEFAULT_HINT = "slot-aware-pyramid"

#: The same where microbatches keep the caller's order, which a pyramid would change.
DEFAULT_NATURAL_HINT = "slot-aware"

#: The values of the option beside names.
_OBJECTS = "a subclass of rrfp.Hint or its instance"

#: All hints but the schedules.
HINTS: Registry[Callable[[], Hint]] = Registry(
    "hint",
    "rrfp.hints",
    {
        "bf": "rrfp.hints.priorities:BackwardForward",
        "fb": "rrfp.hints.priorities:ForwardBackward",
        "b-priority": "rrfp.hints.priorities:BackwardPriority",
        "f-priority": "rrfp.hints.priorities:ForwardPriority",
        "bfw": "rrfp.hints.priorities:BackwardForwardWeight",
        "slot-aware": "rrfp.hints.slot_aware:SlotAware",
        "slot-aware-pyramid": "rrfp.hints.pyramid:slot_aware_pyramid",
        "bfw-pyramid": "rrfp.hints.pyramid:bfw_pyramid",
    },
)


def hint_names() -> tuple[str, ...]:
    """Every name that `create_hint` accepts: built in, plugins, schedules."""
    schedules = schedule_names()
    return (*(name for name in HINTS.names() if name not in schedules), *schedules)


def create_hint(spec: HintSpec) -> Hint:
    """A fresh hint for one stage.

    Args:
        spec: a name, a factory, or an instance to copy.

    Raises:
        ConfigError: for an unknown name, or an object that is no hint.
    """
    if isinstance(spec, str):
        spec = hint_factory(spec)
    if isinstance(spec, type) and Hint not in spec.__mro__:  # whose constructor may ask for arguments
        raise _no_hint(spec)
    hint = called(f"hint {name_of(spec)}", spec) if callable(spec) else spec
    if Hint not in type(hint).__mro__:
        raise _no_hint(type(hint))
    return copy.deepcopy(hint) if hint is spec else hint


def default_hint(order: MicrobatchOrder) -> str:
    """The hint where none is named."""
    return DEFAULT_NATURAL_HINT if order == "natural" else DEFAULT_HINT


def check_order(spec: HintSpec, order: MicrobatchOrder) -> None:
    """Raise a ConfigError for a hint with an order of microbatches of its own where they keep the caller's."""
    orders = type(create_hint(spec)).microbatch_order is not Hint.microbatch_order
    if order == "natural" and orders:
        name = repr(spec) if isinstance(spec, str) else name_of(spec)
        raise ConfigError(
            f"hint is {name}, which orders microbatches itself: must be another one, such as {DEFAULT_NATURAL_HINT}, "
            "with order 'natural', which keeps the caller's"
        )


def check_shared(spec: HintSpec, *, by_claims: bool) -> None:
    """Raise a ConfigError for a hint that cannot order what replicas share, ``by_claims`` or dealt out."""
    hint, name = create_hint(spec), repr(spec) if isinstance(spec, str) else name_of(spec)
    if isinstance(hint, ScheduleHint) and not isinstance(spec, str):
        raise ConfigError(
            f"hint is {name}, the schedule of a certain step: must be another hint, such as {DEFAULT_HINT}, or the "
            f"name of a schedule ({', '.join(schedule_names())}) with share_replicas, which changes what a replica runs"
        )
    if by_claims and hint.may_wait:
        raise ConfigError(
            f"hint is {name}, which may wait for a task (may_wait): must never do so with share_replicas=True, as "
            "another replica may run that task; 'dealt' takes any"
        )


def create_strict(spec: ScheduleSpec) -> Hint:
    """A hint that runs the schedule ``spec`` to the letter."""
    names = schedule_names()
    if not isinstance(spec, CsvSchedule | ExecutedSchedule) and spec not in names:
        raise ConfigError(f"strict is {misspelt(spec, names)}, must be one of: {', '.join(names)}")
    return Strict(_source(spec))


def hint_factory(name: str) -> Callable[[], Hint]:
    """What makes the hint ``name``; an unknown name is a ConfigError."""
    if name in schedule_names():  # before plugins, which cannot replace a schedule
        return lambda: ScheduleHint(_source(name))
    if name not in HINTS:
        names = hint_names()
        raise ConfigError(f"hint is {misspelt(name, names)}, must be one of: {', '.join(names)}, or {_OBJECTS}")
    return HINTS.load(name)


def _no_hint(cls: type) -> ConfigError:
    return ConfigError(f"hint is of type {where_defined(cls)}, must be a name, or {_OBJECTS}")


def _source(spec: ScheduleSpec) -> ScheduleSource:
    if isinstance(spec, ExecutedSchedule):  # which is of certain visits, too
        return lambda view: spec.for_step(view.graph, view.microbatches, view.visits, view.mode)
    return lambda view: make_schedule(spec, view.graph, view.microbatches)


@dataclass(frozen=True, slots=True)
class LoadedHint:
    """Makes the hint that a text leads to, in another process too."""

    text: str

    def __call__(self) -> Hint:
        return create_hint(_loaded(self.text))


@lru_cache(maxsize=64)
def _loaded(text: str) -> Any:
    return named_or_loaded("hint", text)


def named_or_loaded_hint(text: str) -> HintSpec:
    """The argument of `create_hint` for the user's ``text``; tried once."""
    if ":" not in text and not text.endswith(".py") and text not in hint_names():
        wrong, names = misspelt(text, hint_names()), ", ".join(hint_names())
        raise ConfigError(f"hint is {wrong}, must be one of: {names}, or module:attribute, or file.py:attribute")
    spec: HintSpec = LoadedHint(text) if ":" in text else named_or_loaded("hint", text)
    try:
        create_hint(spec)
    except ConfigError:
        raise
    except Exception as error:  # the user's class may raise anything
        raise ConfigError(f"hint is {text!r}: cannot be made ({type(error).__name__}: {error})") from error
    return spec
