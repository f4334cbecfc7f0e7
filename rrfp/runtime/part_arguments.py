"""The arguments of a step that are given by part, where the model has parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rrfp.core.visits import Skipped
from rrfp.errors import ConfigError
from rrfp.graphs.model_graph import ModelGraph


def named_inputs(inputs: Any, graph: ModelGraph | None) -> dict[str, Any]:
    """The lists in ``inputs``, by the names that errors call them; a ConfigError where parts do not fit."""
    if graph is None or inputs is None:
        return {"inputs": inputs}
    if not isinstance(inputs, Mapping):
        raise ConfigError(
            f"inputs is of type {type(inputs).__name__}, must be a dict with a list for each part that has any, of: "
            f"{', '.join(graph.parts)}"
        )
    return named_by_part("inputs", inputs, graph)


def named_targets(targets: Any, graph: ModelGraph | None) -> dict[str, Any]:
    """The lists in ``targets``, by the names that errors call them; a ConfigError where parts do not fit."""
    if graph is None or targets is None or not graph.feeds.losses:
        return {"targets": targets}
    if not isinstance(targets, Mapping):
        raise ConfigError(
            f"targets is of type {type(targets).__name__}, must be a dict with a list for each part with a loss, of: "
            f"{', '.join(graph.sinks)}"
        )
    for name in targets:
        if name not in graph.sinks:
            raise ConfigError(f"targets names {name!r}, must name parts with a loss: {', '.join(graph.sinks)}")
    return {f"targets[{name!r}]": each for name, each in targets.items()}


def named_visits(visits: Any, graph: ModelGraph | None) -> dict[str, Any]:
    """The lists in ``visits``, which `ModelGraph.skipped` checks; a ConfigError for a model without parts."""
    if visits is None:
        return {}
    if graph is None:
        raise ConfigError("visits is given, must be None: the pipeline has no graph, so there are no parts to skip")
    if not isinstance(visits, Mapping):
        raise ConfigError(f"visits is of type {type(visits).__name__}, must be a dict with a list for each part")
    lists = {name: each.tolist() if hasattr(each, "tolist") else each for name, each in visits.items()}
    return {f"visits[{name!r}]": each for name, each in lists.items()}


def with_unvisited(values: Any, skipped: Sequence[Skipped], graph: ModelGraph) -> Any:
    """``values``, with a list of placeholders for each part that no microbatch visits, if they are lists by part.

    So a step without any image needs no ``inputs["vision"]``.
    """
    if not skipped or not isinstance(values, Mapping):
        return values
    unvisited = frozenset.intersection(*skipped)
    return {name: (None,) * len(skipped) for name, own in graph.numbers.items() if own.start in unvisited} | {**values}


def named_by_part(field: str, values: Mapping[Any, Any], graph: ModelGraph) -> dict[str, Any]:
    """``values`` by part, each with the name that errors call it; a ConfigError names a part that does not exist."""
    for name in values:
        if name not in graph.parts:
            raise ConfigError(f"{field} names the part {name!r}, must be one of: {', '.join(graph.parts)}")
    return {f"{field}[{name!r}]": each for name, each in values.items()}
