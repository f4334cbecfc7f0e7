"""The graph of a run, and what its microbatches skip, as plain data in a trace file: as in the cost file of a graph."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

from rrfp.costs.graph_fields import read_graph
from rrfp.costs.graph_names import edge_names, named
from rrfp.model.graph import TaskGraph
from rrfp.plain import value_error, whole
from rrfp.trace.spans import Skip

#: The argument of a run's name that has its graph, and that of a step that has the skipped virtual stages.
GRAPH, SKIPPED = "graph", "skipped"

_FIELDS = ("stages", "virtual_stages", "placement", "edges")


def graph_to_plain(graph: TaskGraph) -> dict[str, Any]:
    """The names of the virtual stages, the stage of each, and the edges by name."""
    names = named(graph)
    return {
        "stages": graph.placement.stages,
        "virtual_stages": [*names],
        "placement": [*graph.stage_of],
        "edges": edge_names(graph),
    }


def graph_from_plain(plain: Any) -> TaskGraph:
    """Read what `graph_to_plain` wrote; backward counts as whole."""
    if not isinstance(plain, dict) or not plain.keys() >= set(_FIELDS):
        raise ValueError(f"args.{GRAPH} is {reprlib.repr(plain)}, must be an object with {', '.join(_FIELDS)}")
    graph, _, _ = read_graph({**{field: plain[field] for field in _FIELDS}, "microbatches": 1})
    return graph


def skipped_to_plain(skipped: Iterable[Skip], graph: TaskGraph) -> dict[str, list[int]]:
    """The microbatches that skip each virtual stage, by name."""
    plain: dict[str, list[int]] = {}
    for microbatch, v in skipped:
        plain.setdefault(graph.names[v], []).append(microbatch)
    return plain


def skipped_from_plain(plain: Any, graph: TaskGraph | None) -> tuple[Skip, ...]:
    """Read what `skipped_to_plain` wrote."""
    numbers = {} if graph is None else {name: v for v, name in enumerate(graph.names)}
    if not isinstance(plain, Mapping) or not plain.keys() <= numbers.keys():
        raise ValueError(
            f"args.{SKIPPED} is {reprlib.repr(plain)}, must be lists of microbatches by virtual stage: "
            f"{', '.join(numbers) or 'none, as the run has no graph'}"
        )
    skips = (
        (whole(f"args.{SKIPPED}.{name}", microbatch, error=value_error), numbers[name])
        for name, microbatches in plain.items()
        for microbatch in (microbatches if isinstance(microbatches, list) else [None])
    )
    return tuple(sorted(skips))
