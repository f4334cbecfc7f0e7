"""What a declared graph means: its virtual stages and edges, their inputs, and what each microbatch of a step skips."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rrfp.errors import ConfigError
from rrfp.model.declared import Graph, Part, PartKey, part_of
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import TablePlacement
from rrfp.model.visits import Visits


class Feed(NamedTuple):
    """One input of a virtual stage from another one."""

    #: The virtual stage whose output it is.
    source: int
    #: The keyword argument; None: the arguments that the output spreads into, as in a chain.
    argument: str | None = None
    #: Of one value of the output, which is a dict; None: all of it.
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Feeds:
    """The inputs of all virtual stages."""

    #: Those of each virtual stage. Empty for a pipeline without parts, where the outputs of predecessors follow one
    #: another in graph order.
    by_stage: tuple[tuple[Feed, ...], ...] = ()
    #: The name of the part of each virtual stage; empty without parts.
    parts: tuple[str, ...] = ()
    #: The virtual stages that begin a part, and are called with what the caller passes for it.
    heads: frozenset[int] = frozenset()
    #: The parts that no other reads, if there are several: each has a loss of its own.
    losses: tuple[str, ...] = ()
    _keys: dict[tuple[int, int], tuple[str, ...] | None] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        keys: dict[tuple[int, int], tuple[str, ...] | None] = {}
        for v, feeds in enumerate(self.by_stage):
            for source in dict.fromkeys(feed.source for feed in feeds):
                read = [feed.key for feed in feeds if feed.source == source]
                if None not in read:
                    keys[source, v] = tuple(dict.fromkeys(key for key in read if key is not None))
        object.__setattr__(self, "_keys", keys)

    def loss_of(self, virtual_stage: int) -> str:
        """The part whose loss a last virtual stage computes; "" where the model has one loss."""
        return self.parts[virtual_stage] if self.losses else ""

    def keys(self, source: int, readers: Iterable[int]) -> tuple[str, ...] | None:
        """The values of the output of ``source`` that ``readers`` read together; None: all of it."""
        wanted: dict[str, None] = {}
        for reader in readers if self._keys else ():
            if (keys := self._keys.get((source, reader))) is None:
                return None
            wanted.update(dict.fromkeys(keys))
        return tuple(wanted) or None


@dataclass(frozen=True)
class ModelGraph:
    """A declared graph with its parts' modules numbered as virtual stages, in the order of declaration."""

    declared: Graph
    #: The dependency graph of its virtual stages.
    tasks: TaskGraph
    #: What each of them is called with.
    feeds: Feeds
    #: The virtual stages of each part, by name.
    numbers: Mapping[str, range]
    #: What reads each part, by name.
    _readers: Mapping[str, frozenset[str]] = field(repr=False)

    @classmethod
    def of(cls, declared: object, *, split: bool = False) -> ModelGraph:
        """Number and connect the virtual stages of ``declared``, ``split`` all of them or none."""
        if not isinstance(declared, Graph):
            raise ConfigError(f"graph is of type {type(declared).__name__}, must be an rrfp.Graph")
        parts = declared.parts.values()
        if not parts:
            raise ConfigError("graph has no parts, must have at least one: graph.part(name, stages=[...])")
        readers = {each.name: frozenset(p.name for p in parts if each in p.sources) for each in parts}
        sinks = [each for each in parts if not readers[each.name]]
        if len(sinks) == 1 and sinks[0].optional:
            raise ConfigError(f"part {sinks[0].name!r} computes the loss, since no part reads it: must not be optional")
        _check_stages(declared)
        numbers: dict[str, range] = {}
        for part in parts:
            first = sum(map(len, numbers.values()))
            numbers[part.name] = range(first, first + len(part.stages))
        feeds = tuple(tuple(_feeds(part, i, numbers)) for part in parts for i in range(len(part.stages)))
        edges = tuple((u, v) for v, own in enumerate(feeds) for u in dict.fromkeys(feed.source for feed in own))
        placement = TablePlacement(tuple(stage for part in parts for stage in part.stages))
        names = tuple(_name(part, i) for part in parts for i in range(len(part.stages)))
        tasks = TaskGraph(placement, edges, (split,) * len(names), names)
        heads = frozenset(own.start for own in numbers.values())
        owners = tuple(part.name for part in parts for _ in part.stages)
        losses = tuple(each.name for each in sinks) if len(sinks) > 1 else ()
        graph = cls(declared, tasks, Feeds(feeds, owners, heads, losses), numbers, readers)
        graph._check_ways_round()
        return graph

    @property
    def parts(self) -> Mapping[str, Part]:
        return self.declared.parts

    @property
    def optional(self) -> tuple[str, ...]:
        """The names of the parts that a microbatch may skip."""
        return tuple(name for name, part in self.parts.items() if part.optional)

    @property
    def sinks(self) -> tuple[str, ...]:
        """The names of the parts that no other reads: those with a loss."""
        return tuple(name for name, readers in self._readers.items() if not readers)

    def parts_of(self, stage: int) -> dict[str, tuple[int, ...]]:
        stage_of = self.tasks.stage_of
        here = {name: tuple(v for v in own if stage_of[v] == stage) for name, own in self.numbers.items()}
        return {name: own for name, own in here.items() if own}

    def visits_of(self, visits: object, microbatches: int) -> Visits:
        """What ``visits`` of a step says: for each optional part that some microbatch skips, M booleans."""
        if visits is None:
            return Visits(microbatches)
        skips: list[set[str]] = [set() for _ in range(microbatches)]
        for name, visited in visit_lists(visits).items():
            for m, visit in enumerate(self._checked_visits(name, visited, microbatches)):
                if not visit:
                    skips[m].add(name)
        for m, skipped in enumerate(skips):
            if ends := self._dead_ends(skipped):
                raise ConfigError(
                    f"visits: microbatch {m} visits {ends[0]!r} and skips all parts that read it: must skip it too, "
                    f"or visit one of: {', '.join(sorted(self._readers[ends[0]]))}"
                )
            if skipped.issuperset(self.sinks):
                raise ConfigError(
                    f"visits: microbatch {m} skips all parts with a loss: must visit one of: {', '.join(self.sinks)}"
                )
        numbers = self.numbers
        return Visits(microbatches, tuple(frozenset(v for name in own for v in numbers[name]) for own in skips))

    def _checked_visits(self, name: object, visited: Any, microbatches: int) -> Sequence[bool]:
        if name not in self.optional:
            known = ", ".join(self.optional) or "none: no part is optional"
            raise ConfigError(f"visits names {name!r}, must name optional parts: {known}")
        is_list = isinstance(visited, Sequence) and all(type(visit) is bool for visit in visited)
        if not is_list or len(visited) != microbatches:
            raise ConfigError(
                f"visits[{name!r}] is {visited!r:.80}, must be a list of {microbatches} booleans, one for each "
                "microbatch"
            )
        return [*visited]

    def _dead_ends(self, skipped: set[str]) -> list[str]:
        """The parts that a microbatch visits which skips ``skipped``, and that nothing it visits reads."""
        return [
            name for name, readers in self._readers.items() if readers and name not in skipped and readers <= skipped
        ]

    def _check_ways_round(self) -> None:
        for optional in self.optional:
            for name in self._dead_ends({optional}):
                if not self.parts[name].optional:
                    raise ConfigError(
                        f"part {optional!r} is optional, and where it is skipped nothing reads part {name!r}: a later "
                        f"part must read {name!r} too, or {name!r} must be optional"
                    )


def _check_stages(declared: Graph) -> None:
    used = {stage for part in declared.parts.values() for stage in part.stages}
    if missing := sorted(set(range(max(used))) - used):
        raise ConfigError(
            f"graph: stage {missing[0]} has no part, must have one: stages are numbered from 0 to {max(used)}"
        )


def _feeds(part: Part, index: int, numbers: Mapping[str, range]) -> list[Feed]:
    """The inputs of module ``index`` of ``part`` from other virtual stages."""
    reads: dict[str, Part | PartKey] = {**({} if index else part.reads), **part.reads_all}
    feeds = [Feed(numbers[part.name][index - 1])] if index else []
    for argument, read in reads.items():
        key = read.key if isinstance(read, PartKey) else None
        feeds.append(Feed(numbers[part_of(read).name][-1], argument, key))
    return feeds


def _name(part: Part, index: int) -> str:
    return part.name if len(part.stages) == 1 else f"{part.name}.{index}"


def visit_lists(visits: object) -> dict[str, Any]:
    """The lists of ``visits`` by part, also those of arrays and tensors; a ConfigError if it is no dict."""
    if not isinstance(visits, Mapping):
        raise ConfigError(f"visits is of type {type(visits).__name__}, must be a dict with a list for each part")
    return {name: each.tolist() if hasattr(each, "tolist") else each for name, each in visits.items()}
