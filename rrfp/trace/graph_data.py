"""The graph of a run, and what its microbatches skip, as plain data in a trace file: as in the cost file of a graph."""

import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

from rrfp.model import plain_graph
from rrfp.model.graph import TaskGraph
from rrfp.plain import value_error, whole
from rrfp.trace.spans import Skip

#: The argument of a run's name that has its graph, and that of a step that has the skipped virtual stages.
GRAPH, SKIPPED = "graph", "skipped"


def graph_from_plain(plain: Any) -> TaskGraph:
    """Read the argument `GRAPH`; backward counts as whole."""
    fields = plain_graph.PLAIN_FIELDS
    if not isinstance(plain, dict) or not plain.keys() >= set(fields):
        raise ValueError(f"args.{GRAPH} is {reprlib.repr(plain)}, must be an object with {', '.join(fields)}")
    return plain_graph.graph_from_plain(plain)


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
