"""The order in which one process calls the modules of a pipeline for one microbatch, and what it calls them with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from rrfp.compute.named_tuples import is_named
from rrfp.errors import ConfigError
from rrfp.graphs.declared import Graph, Part, PartKey, part_of
from rrfp.graphs.model_graph import ModelGraph

#: Calls the module of a virtual stage with arguments and keyword arguments; returns its output.
Call = Callable[[int, tuple[Any, ...], Mapping[str, Any]], Any]

#: Keyword arguments by microbatch.
Kwargs = Sequence[Mapping[str, Any]]


class Walk(ABC):
    """The way of microbatches through the modules.

    Attributes:
        modules: by virtual stage.
        microbatches: M.
        ends: the virtual stages whose outputs go into losses, each with its part; "" where there is one loss.
    """

    modules: Sequence[nn.Module]
    microbatches: int
    ends: Mapping[int, str]

    @abstractmethod
    def output(self, microbatch: int, call: Call) -> Any:
        """Call all modules that ``microbatch`` visits.

        Returns:
            The output of the last one; by part, where there are several losses.
        """


class ChainWalk(Walk):
    """Each module reads the output of the one before."""

    def __init__(self, modules: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Kwargs | None) -> None:
        self.modules, self.microbatches, self.ends = modules, len(inputs), {len(modules) - 1: ""}
        self._inputs = inputs
        self._kwargs = kwargs

    def output(self, microbatch: int, call: Call) -> Any:
        """See `Walk.output`."""
        value = self._inputs[microbatch]
        further = {} if self._kwargs is None else self._kwargs[microbatch]
        for v in range(len(self.modules)):
            args, kwargs = spread(value)
            value = call(v, args, {**kwargs, **further})
        return value


class GraphWalk(Walk):
    """Parts in the order of their declaration, each with what it reads.

    Raises ConfigError if modules, inputs or visits do not fit the graph.
    """

    def __init__(
        self,
        graph: Graph,
        modules: Mapping[str, nn.Module | Sequence[nn.Module]],
        inputs: Mapping[str, Sequence[Any]],
        kwargs: Kwargs | Mapping[str, Kwargs] | None,
        visits: Mapping[str, Sequence[bool]] | None,
    ) -> None:
        by_part = {name: [own] if isinstance(own, nn.Module) else list(own) for name, own in modules.items()}
        counts = {name: len(own) for name, own in by_part.items()}
        wanted = {name: len(part.stages) for name, part in graph.parts.items()}
        if counts != wanted:
            raise ConfigError(f"modules has {counts} modules by part, must have {wanted}")
        lengths = {len(values) for values in inputs.values()}
        if len(lengths) != 1:
            raise ConfigError("inputs must have a list for each part that has any, all with one entry a microbatch")
        self.microbatches = lengths.pop()
        model = ModelGraph.of(graph)
        model.skipped(visits, self.microbatches)
        self.modules = [module for name in graph.parts for module in by_part[name]]
        self._graph, self._inputs, self._kwargs = graph, inputs, kwargs
        self._visits = {} if visits is None else visits
        several = len(model.sinks) > 1
        self.ends = {model.numbers[name][-1]: name if several else "" for name in model.sinks}

    def output(self, microbatch: int, call: Call) -> Any:
        """See `Walk.output`."""
        outputs: dict[Part, Any] = {}
        values: dict[int, Any] = {}
        v = 0
        for part in self._graph.parts.values():
            further = self._further(part, microbatch)
            for index in range(len(part.stages)):
                if self._is_visited(part, microbatch):
                    reads = {**({} if index else part.reads), **part.reads_all}
                    args, kwargs = self._own(part, microbatch) if index == 0 else spread(outputs[part])
                    named = {name: _value(read, outputs) for name, read in reads.items()}
                    outputs[part] = values[v] = call(v, args, {**kwargs, **further, **named})
                v += 1
        if "" in self.ends.values():
            return values[next(iter(self.ends))]
        return {part: values[end] for end, part in self.ends.items() if end in values}

    def _is_visited(self, part: Part, microbatch: int) -> bool:
        return part.name not in self._visits or bool(self._visits[part.name][microbatch])

    def _own(self, part: Part, microbatch: int) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        return spread(self._inputs[part.name][microbatch]) if part.name in self._inputs else ((), {})

    def _further(self, part: Part, microbatch: int) -> Mapping[str, Any]:
        kwargs = self._kwargs.get(part.name) if isinstance(self._kwargs, Mapping) else self._kwargs
        return {} if kwargs is None else kwargs[microbatch]


def spread(value: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The arguments and keyword arguments that an output, or an input of the caller, becomes."""
    if isinstance(value, Mapping):
        return (), value
    return value if isinstance(value, tuple) and not is_named(value) else (value,), {}


def _value(read: Part | PartKey, outputs: Mapping[Part, Any]) -> Any:
    output = outputs.get(part_of(read))
    return output if output is None or isinstance(read, Part) else output[read.key]
