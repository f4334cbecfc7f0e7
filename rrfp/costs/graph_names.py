"""Names of virtual stages, and of edges by these: what the cost file of a graph has instead of numbers."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence

from rrfp.errors import ConfigError
from rrfp.model.graph import TaskGraph

#: Between the names of an edge's ends.
ARROW = " -> "


def named(graph: TaskGraph) -> tuple[str, ...]:
    """The names of the virtual stages: their numbers where the graph has none."""
    return check_names(graph.names or tuple(map(str, range(graph.placement.num_virtual_stages))))


def check_names(names: Sequence[object]) -> tuple[str, ...]:
    """The names of all virtual stages."""
    if not names:
        raise ConfigError("virtual_stages is empty, must have a name for each virtual stage")
    checked: dict[str, None] = {}
    for v, name in enumerate(names):
        if not isinstance(name, str) or not name or ARROW in name or name in checked:
            raise ConfigError(
                f"virtual_stages[{v}] is {reprlib.repr(name)}, must be a name that no other has, without {ARROW!r}"
            )
        checked[name] = None
    return tuple(checked)


def edge_names(graph: TaskGraph) -> list[str]:
    """The edges of a graph whose virtual stages have names, as "NAME -> NAME"."""
    return [ARROW.join((graph.names[u], graph.names[v])) for u, v in graph.edges or ()]
