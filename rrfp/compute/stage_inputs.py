"""What a rank's modules are called with in one step: the caller's part of it, and what came from other stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rrfp.compute.activations import tensors_in
from rrfp.compute.calling import Arguments
from rrfp.compute.payload import Payload
from rrfp.compute.program import Batch
from rrfp.core.graph import Graph
from rrfp.graphs.feeds import Feeds


class StageInputs:
    """The batch of a step, by microbatch and virtual stage.

    Args:
        batch: of the step.
        graph: says which virtual stages read from others, and which end the pipeline.
        feeds: how each of them reads.
    """

    def __init__(self, batch: Batch, graph: Graph, feeds: Feeds) -> None:
        self._batch = batch
        self._graph = graph
        self._feeds = feeds

    def of_caller(self, m: int, v: int) -> tuple[Any, ...]:
        """The caller's input and its keyword arguments; each is missing where there is none."""
        batch, graph, parts = self._batch, self._graph, self._feeds.parts
        inputs: Any = batch.inputs
        kwargs: Any = batch.kwargs
        if parts:
            inputs = inputs.get(parts[v]) if isinstance(inputs, Mapping) and v in self._feeds.heads else None
            kwargs = kwargs.get(parts[v]) if isinstance(kwargs, Mapping) else kwargs
        elif graph.predecessors[v]:
            inputs = None
        return tuple([own[m] for own in (inputs, kwargs) if own is not None])

    def arguments(self, m: int, v: int, received: Sequence[Any]) -> Arguments:
        """Those of the module's call; ``received`` came from the predecessors of ``v``."""
        own = self.of_caller(m, v)
        if not (feeds := self._feeds.by_stage):
            return Arguments.spread([*received, *own])
        values = dict(zip(self._graph.predecessors[v], received, strict=True))
        spread: list[Any] = []
        named: dict[str, Any] = {}
        for source, argument, key in feeds[v]:
            value = values[source]
            if argument is None:
                spread.append(value)
            else:
                named[argument] = value if key is None or value is None else value[key]
        return Arguments.spread([*spread, *own, named])

    def targets(self, v: int) -> Sequence[Any] | None:
        """The targets by microbatch; None unless ``v`` is a last virtual stage for which the caller gave any."""
        targets = self._batch.targets
        if targets is None or self._graph.successors[v]:
            return None
        return targets.get(self._feeds.parts[v]) if isinstance(targets, Mapping) else targets

    def num_bytes(self, m: int, v: int, received: Sequence[Payload]) -> int:
        """Of received tensors and of the caller's, as dense ones."""
        own = sum(each.numel() * each.element_size() for each in tensors_in(self.of_caller(m, v)))
        return own + sum(each.num_bytes for each in received)
