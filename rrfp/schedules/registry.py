"""Schedules by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from rrfp.core.graph import Graph
from rrfp.core.schedule import Schedule
from rrfp.errors import ConfigError
from rrfp.schedules.gpipe import gpipe
from rrfp.schedules.one_f_one_b import one_f_one_b

#: Makes the order of every stage for a graph and M microbatches, without weight tasks where it does not place them
#: itself.
ScheduleGenerator = Callable[[Graph, int], Schedule]

_GENERATORS: dict[str, ScheduleGenerator] = {"gpipe": gpipe, "1f1b": one_f_one_b}
#: Schedules made for one chunk a stage.
_ONE_CHUNK = frozenset({"gpipe", "1f1b"})


def schedule_names() -> tuple[str, ...]:
    """The known names."""
    return tuple(_GENERATORS)


def schedule_generator(name: str) -> ScheduleGenerator:
    """What makes the schedule ``name``.

    Raises:
        ConfigError: for an unknown name.
    """
    if name not in _GENERATORS:
        raise ConfigError(f"schedule is {name!r}, must be one of: {', '.join(_GENERATORS)}")
    return _GENERATORS[name]


@lru_cache(maxsize=64)
def make_schedule(name: str, graph: Graph, microbatches: int) -> Schedule:
    """The schedule ``name`` for ``graph``, complete and validated; unsplit schedules get each W right after its B.

    Raises:
        ConfigError: for an unknown name, or a schedule that does not fit the graph.
    """
    generate = schedule_generator(name)
    if name in _ONE_CHUNK and graph.placement.chunks != 1:
        raise ConfigError(f"schedule {name} takes 1 chunk a stage, the placement has {graph.placement.chunks}")
    return generate(graph, microbatches).with_weights(graph).validate(graph, microbatches)
