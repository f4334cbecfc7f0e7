"""Schedules by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from rrfp.errors import ConfigError, misspelt
from rrfp.model.graph import TaskGraph
from rrfp.model.schedule import Schedule
from rrfp.schedules import generators
from rrfp.schedules.csv import CsvSchedule
from rrfp.schedules.generators import Needs

#: Makes the order of every stage for a graph and M microbatches; may leave out weight tasks.
ScheduleGenerator = Callable[[TaskGraph, int], Schedule]

#: A schedule's name, or the text of a schedule file.
ScheduleSpec = str | CsvSchedule

_KNOWN: dict[str, tuple[ScheduleGenerator, Needs]] = {
    "gpipe": (generators.gpipe, Needs(chunks=1)),
    "1f1b": (generators.one_f_one_b, Needs(chunks=1)),
    "interleaved-1f1b": (generators.interleaved_1f1b, Needs(layout="looped")),
    "zb-h1": (generators.zb_h1, Needs(chunks=1, split=True)),
    "zb-v": (generators.zb_v, Needs(chunks=2, layout="v", split=True)),
}


def schedule_names() -> tuple[str, ...]:
    """The known names."""
    return tuple(_KNOWN)


def schedule_generator(name: str) -> ScheduleGenerator:
    """The generator of the schedule ``name``; an unknown name is a ConfigError."""
    return _known(name)[0]


def schedule_needs(name: str) -> Needs:
    """The requirements of the schedule ``name`` on a graph; an unknown name is a ConfigError."""
    return _known(name)[1]


# Why so few? A schedule of a thousand stages takes a hundred megabytes.
@lru_cache(maxsize=16)
def make_schedule(spec: ScheduleSpec, graph: TaskGraph, microbatches: int) -> Schedule:
    """The schedule ``spec`` for ``graph``, complete and validated; a W that a named one omits runs right after its B.

    An unknown name, or a schedule that does not fit the graph, is a ConfigError.
    """
    if isinstance(spec, CsvSchedule):
        return spec.for_graph(graph, microbatches)
    generate, needs = _known(spec)
    needs.check(spec, graph)
    return generate(graph, microbatches).with_weights(graph).validate(graph, microbatches)


def _known(name: str) -> tuple[ScheduleGenerator, Needs]:
    if name not in _KNOWN:
        raise ConfigError(f"schedule is {misspelt(name, _KNOWN)}, must be one of: {', '.join(_KNOWN)}")
    return _KNOWN[name]
