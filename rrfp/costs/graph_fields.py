"""The fields of a cost file that describe a graph, in place of the chain's chunks and placement.

    "stages": 4, "microbatches": 2,
    "virtual_stages": ["vision", "audio", "lm.0", "lm.1"],
    "placement": [0, 1, 2, 3],                                    the stage of each
    "edges": ["vision -> lm.0", "audio -> lm.0", "lm.0 -> lm.1"],
    "skipped": {"vision": [1]}                                    the microbatches that do not visit it

F, B, W and bytes have their rows in the order of the virtual stages, the latencies in that of the edges.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from rrfp.costs.graph_names import ARROW, check_names, edge_names
from rrfp.costs.table import CostTable
from rrfp.errors import ConfigError
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import TablePlacement
from rrfp.model.visits import Skipped
from rrfp.plain import whole

#: In the order of writing.
GRAPH_FIELDS = ("stages", "microbatches", "virtual_stages", "placement", "edges", "skipped")


def graph_fields(table: CostTable) -> Mapping[str, Any]:
    """The fields that describe the graph of ``table``; the value of an absent one is None."""
    assert table.graph is not None
    skippers = {
        name: [m for m, skipped in enumerate(table.skipped) if v in skipped] for v, name in enumerate(table.graph.names)
    }
    return {
        "stages": table.stages,
        "microbatches": table.microbatches,
        "virtual_stages": list(table.graph.names),
        "placement": list(table.graph.stage_of),
        "edges": edge_names(table.graph),
        "skipped": {name: microbatches for name, microbatches in skippers.items() if microbatches} or None,
    }


def read_graph(document: Mapping[str, Any]) -> tuple[TaskGraph, int, tuple[Skipped, ...]]:
    """The graph of a cost file, its microbatches, and what each of them skips."""
    names = check_names(_list("virtual_stages", document["virtual_stages"], "of names"))
    stages, microbatches = whole("stages", document["stages"], 1), whole("microbatches", document["microbatches"], 1)
    placement = _list("placement", document["placement"], "of stages, one for each of virtual_stages")
    if len(placement) != len(names):
        raise ConfigError(f"placement has {len(placement)} entries, must have {len(names)}, one a virtual stage")
    for v, stage in enumerate(placement):
        whole(f"placement[{v}]", stage, 0, stages - 1)
    if missing := sorted({*range(min(stages, len(names) + 1))} - {*placement}):
        raise ConfigError(f"placement has no virtual stage on stage {missing[0]}, must have one on each of {stages}")
    edges = _edges(_list("edges", document["edges"], f"of 'NAME{ARROW}NAME'"), names)
    graph = TaskGraph(TablePlacement(tuple(placement)), edges, names=names)
    return graph, microbatches, _skipped(document.get("skipped", {}), names, microbatches)


def _list(field: str, value: object, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise ConfigError(f"{field} is {reprlib.repr(value)}, must be a list {what}")
    return value


def _edges(texts: Sequence[Any], names: Sequence[str]) -> tuple[tuple[int, int], ...]:
    numbers = {name: v for v, name in enumerate(names)}
    edges: dict[tuple[int, int], None] = {}
    for index, text in enumerate(texts):
        ends = text.split(ARROW) if isinstance(text, str) else []
        if len(ends) != 2:
            raise ConfigError(f"edges[{index}] is {reprlib.repr(text)}, must be 'NAME{ARROW}NAME'")
        for name in ends:
            if name not in numbers:
                raise ConfigError(f"edges[{index}] names {reprlib.repr(name)}, must be one of {_listed(names)}")
        edge = (numbers[ends[0]], numbers[ends[1]])
        if edge[0] >= edge[1]:
            raise ConfigError(f"edges[{index}] is {text!r}, must lead to a later one of virtual_stages")
        if edge in edges:
            raise ConfigError(f"edges[{index}] is {text!r}, which is given more than once")
        edges[edge] = None
    return tuple(edges)


def _skipped(value: object, names: Sequence[str], microbatches: int) -> tuple[Skipped, ...]:
    if not isinstance(value, dict):
        raise ConfigError(f"skipped is {reprlib.repr(value)}, must be an object: NAME -> list of microbatches")
    skipped: list[set[int]] = [set() for _ in range(microbatches)]
    for name, skippers in value.items():
        if name not in names:
            raise ConfigError(f"skipped names {reprlib.repr(name)}, must be one of {_listed(names)}")
        for microbatch in _list(f"skipped[{name!r}]", skippers, "of microbatches"):
            skipped[whole(f"skipped[{name!r}]", microbatch, 0, microbatches - 1)].add(names.index(name))
    return tuple(map(frozenset, skipped))


def _listed(names: Sequence[str]) -> str:
    """The names, those in the middle left out where there are many."""
    return ", ".join(names) if len(names) <= 12 else ", ".join((*names[:6], "...", *names[-3:]))
