"""Hints by name: built in, schedules used as hints, and plugins of the entry point group ``rrfp.hints``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib.metadata import entry_points

from rrfp.core.hint import Hint
from rrfp.errors import ConfigError
from rrfp.hints.alternating import BackwardForward, ForwardBackward
from rrfp.hints.priority import BackwardPriority, ForwardPriority
from rrfp.hints.pyramid import bfw_pyramid, slot_aware_pyramid
from rrfp.hints.schedule import ScheduleHint, ScheduleSource, Strict
from rrfp.hints.slot_aware import SlotAware
from rrfp.hints.split import BackwardForwardWeight
from rrfp.schedules.registry import ScheduleSpec, make_schedule, schedule_names

#: A caller's hint: a name, a class or other factory, or an instance, of which every stage gets a copy.
HintSpec = str | Hint | Callable[[], Hint]

_GROUP = "rrfp.hints"
_BUILT_IN: dict[str, Callable[[], Hint]] = {
    "bf": BackwardForward,
    "fb": ForwardBackward,
    "b-priority": BackwardPriority,
    "f-priority": ForwardPriority,
    "bfw": BackwardForwardWeight,
    "slot-aware": SlotAware,
    "slot-aware-pyramid": slot_aware_pyramid,
    "bfw-pyramid": bfw_pyramid,
}


def hint_names() -> tuple[str, ...]:
    """Every name that `create_hint` accepts: built in, plugins, schedules."""
    reserved = (*_BUILT_IN, *schedule_names())
    plugins = {point.name for point in entry_points(group=_GROUP)}.difference(reserved)
    return (*_BUILT_IN, *sorted(plugins), *schedule_names())


def create_hint(spec: HintSpec) -> Hint:
    """A fresh hint for one stage.

    Raises:
        ConfigError: for an unknown name, or an object that is no hint.
    """
    if isinstance(spec, str):
        spec = hint_factory(spec)
    hint = spec() if callable(spec) else copy.deepcopy(spec)
    for method in ("choose", "open_step", "observe"):
        if not callable(getattr(hint, method, None)):
            raise ConfigError(f"hint {type(hint).__name__} has no method {method}(); subclass rrfp.Hint")
    return hint


def create_strict(spec: ScheduleSpec) -> Hint:
    """A hint that runs the schedule ``spec`` to the letter.

    Raises:
        ConfigError: for an unknown schedule.
    """
    if isinstance(spec, str) and spec not in schedule_names():
        raise ConfigError(f"strict is {spec!r}, must be one of: {', '.join(schedule_names())}")
    return Strict(_source(spec))


def hint_factory(name: str) -> Callable[[], Hint]:
    """The factory of the hint ``name``: a class, or any other callable.

    Raises:
        ConfigError: for an unknown name.
    """
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    if name in schedule_names():
        return lambda: ScheduleHint(_source(name))
    for point in entry_points(group=_GROUP):
        if point.name == name:
            factory: Callable[[], Hint] = point.load()
            return factory
    raise ConfigError(f"hint is {name!r}, must be one of: {', '.join(hint_names())}")


def _source(spec: ScheduleSpec) -> ScheduleSource:
    return lambda view: make_schedule(spec, view.graph, view.microbatches)
