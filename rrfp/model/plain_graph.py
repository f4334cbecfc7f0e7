"""The plain form of a graph in cost files and traces: virtual stages and edges by name.

"stages": 4,
"virtual_stages": ["vision", "audio", "lm.0", "lm.1"],
"placement": [0, 1, 2, 3],                                    the stage of each
"edges": ["vision -> lm.0", "audio -> lm.0", "lm.0 -> lm.1"]
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from rrfp.errors import ConfigError
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import TablePlacement
from rrfp.plain import whole

#: Between the names of an edge's ends.
ARROW = " -> "

#: In the order of writing.
PLAIN_FIELDS = ("stages", "virtual_stages", "placement", "edges")


def names_of(graph: TaskGraph) -> tuple[str, ...]:
    """The names of the virtual stages: their numbers where the graph has none."""
    return check_names(graph.names or tuple(map(str, range(graph.placement.num_virtual_stages))))


def check_names(names: Sequence[object]) -> tuple[str, ...]:
    """The names of all virtual stages; a ConfigError if there is none, or one is empty, repeated or has an arrow."""
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


def graph_to_plain(graph: TaskGraph) -> dict[str, Any]:
    """The `PLAIN_FIELDS` of a graph whose virtual stages have names."""
    return {
        "stages": graph.placement.stages,
        "virtual_stages": [*names_of(graph)],
        "placement": [*graph.stage_of],
        "edges": edge_names(graph),
    }


def graph_from_plain(plain: Mapping[str, Any]) -> TaskGraph:
    """Read what `graph_to_plain` wrote, backward whole; a ConfigError names the wrong field."""
    names = check_names(checked_list("virtual_stages", plain["virtual_stages"], "of names"))
    stages = whole("stages", plain["stages"], 1)
    placement = checked_list("placement", plain["placement"], "of stages, one for each of virtual_stages")
    if len(placement) != len(names):
        raise ConfigError(f"placement has {len(placement)} entries, must have {len(names)}, one a virtual stage")
    for v, stage in enumerate(placement):
        whole(f"placement[{v}]", stage, 0, stages - 1)
    if missing := sorted({*range(min(stages, len(names) + 1))} - {*placement}):
        raise ConfigError(f"placement has no virtual stage on stage {missing[0]}, must have one on each of {stages}")
    edges = _edges(checked_list("edges", plain["edges"], f"of 'NAME{ARROW}NAME'"), names)
    return TaskGraph(TablePlacement(tuple(placement)), edges, names=names)


def checked_list(field: str, value: object, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise ConfigError(f"{field} is {reprlib.repr(value)}, must be a list {what}")
    return value


def listed(names: Sequence[str]) -> str:
    """The names, those in the middle left out where there are many."""
    return ", ".join(names) if len(names) <= 12 else ", ".join((*names[:6], "...", *names[-3:]))


def _edges(texts: Sequence[Any], names: Sequence[str]) -> tuple[tuple[int, int], ...]:
    numbers = {name: v for v, name in enumerate(names)}
    edges: dict[tuple[int, int], None] = {}
    for index, text in enumerate(texts):
        ends = text.split(ARROW) if isinstance(text, str) else []
        if len(ends) != 2:
            raise ConfigError(f"edges[{index}] is {reprlib.repr(text)}, must be 'NAME{ARROW}NAME'")
        for name in ends:
            if name not in numbers:
                raise ConfigError(f"edges[{index}] names {reprlib.repr(name)}, must be one of: {listed(names)}")
        edge = (numbers[ends[0]], numbers[ends[1]])
        if edge[0] >= edge[1]:
            raise ConfigError(f"edges[{index}] is {text!r}, must lead to a later one of virtual_stages")
        if edge in edges:
            raise ConfigError(f"edges[{index}] is {text!r}, which is given more than once")
        edges[edge] = None
    return tuple(edges)
