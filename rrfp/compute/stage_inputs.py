"""The caller's part of what a rank's modules are called with in one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rrfp.compute.activations import tensors_in
from rrfp.compute.calling import Arguments
from rrfp.compute.payload import Payload
from rrfp.compute.program import Batch
from rrfp.core.graph import Graph


class StageInputs:
    """The batch of a step, by microbatch and virtual stage.

    Args:
        batch: of the step.
        graph: says which virtual stages read from others, and which end the pipeline.
    """

    def __init__(self, batch: Batch, graph: Graph) -> None:
        self._batch = batch
        self._graph = graph

    def of_caller(self, m: int, v: int) -> tuple[Any, Any]:
        """The caller's input, None where ``v`` reads from others, and its keyword arguments, None if there are none."""
        batch = self._batch
        own = None if self._graph.predecessors[v] or batch.inputs is None else batch.inputs[m]
        return own, None if batch.kwargs is None else batch.kwargs[m]

    def arguments(self, m: int, v: int, received: Sequence[Any]) -> Arguments:
        """Those of the module's call; ``received`` came from the predecessors of ``v``."""
        own, kwargs = self.of_caller(m, v)
        values = received if self._graph.predecessors[v] else [own]
        return Arguments.spread(values if kwargs is None else [*values, kwargs])

    def target(self, m: int, v: int) -> Any:
        """The target; None unless ``v`` is a last virtual stage and the caller gave targets."""
        targets = self._batch.targets
        return None if targets is None or self._graph.successors[v] else targets[m]

    def num_bytes(self, m: int, v: int, received: Sequence[Payload]) -> int:
        """Of received tensors and of the caller's, as dense ones."""
        own = sum(each.numel() * each.element_size() for each in tensors_in(self.of_caller(m, v)))
        return own + sum(each.num_bytes for each in received)
