"""`Graph` and `Part`: a model of several parts, as its user writes it down."""

from __future__ import annotations

import keyword
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from rrfp.errors import ConfigError
from rrfp.plain import flag


class Part:
    """One part of a model: modules in a row, one on each of its stages. Made by `Graph.part`.

    Its output is that of its last module. ``part["key"]`` is one value of an output that is a dict: a part that reads
    it gets that value alone, and only that value travels.

    Attributes:
        name: unique in its graph.
        stages: the stage of each of its modules, in order; a stage may occur several times.
        reads: what its first module reads, by keyword argument.
        reads_all: what each of its modules reads, by keyword argument.
        optional: whether a microbatch may skip it.
    """

    __slots__ = ("name", "optional", "reads", "reads_all", "stages")

    def __init__(
        self,
        name: str,
        stages: tuple[int, ...],
        reads: Mapping[str, Part | PartKey],
        reads_all: Mapping[str, Part | PartKey],
        optional: bool,
    ) -> None:
        self.name = name
        self.stages = stages
        self.reads = dict(reads)
        self.reads_all = dict(reads_all)
        self.optional = optional

    def __getitem__(self, key: str) -> PartKey:
        return PartKey(self, key)

    def __iter__(self) -> Iterator[Any]:  # or Python would call __getitem__ with 0, 1, 2, ...
        raise TypeError(f"part {self.name!r} is not iterable; write part['key'] for one value of its output")

    def __repr__(self) -> str:
        return f"<Part {self}>"

    def __str__(self) -> str:
        """Such as ``lm on stages 3, 4 reads image=vision, optional``."""
        several = "s" if len(self.stages) > 1 else ""
        text = f"{self.name} on stage{several} {', '.join(map(str, self.stages))}"
        for word, reads in (("reads", self.reads), ("reads_all", self.reads_all)):
            if reads:
                text += f" {word} " + ", ".join(f"{name}={_text(source)}" for name, source in reads.items())
        return text + (", optional" if self.optional else "")

    @property
    def sources(self) -> tuple[Part, ...]:
        """The parts that it reads, each once."""
        return tuple(dict.fromkeys(part_of(read) for read in (*self.reads.values(), *self.reads_all.values())))


class PartKey:
    """One value of a part's output; see `Part`."""

    __slots__ = ("key", "part")

    def __init__(self, part: Part, key: str) -> None:
        if type(key) is not str:
            raise ConfigError(f"{part.name}[{key!r}] must have a text as key: that of a value in the part's output")
        self.part = part
        self.key = key

    def __repr__(self) -> str:
        return f"<PartKey {self}>"

    def __str__(self) -> str:
        return f"{self.part.name}[{self.key!r}]"


def _text(read: Part | PartKey) -> str:
    return read.name if isinstance(read, Part) else str(read)


def part_of(read: Part | PartKey) -> Part:
    return read.part if isinstance(read, PartKey) else read


class Graph:
    """A model whose parts form a graph: encoders beside a language model, an encoder-decoder, skip connections.

    Declare each part after those that it reads, so a graph has no cycle. One part, which no other reads, computes the
    loss. Pass the graph to `rrfp.Pipeline` and `rrfp.local`; it must be the same on all ranks.
    """

    def __init__(self) -> None:
        #: By name, in the order of their declaration.
        self.parts: dict[str, Part] = {}

    def __repr__(self) -> str:
        return f"<Graph: {self}>"

    def __str__(self) -> str:
        return "; ".join(map(str, self.parts.values())) or "no parts"

    def part(
        self,
        name: str,
        *,
        stages: Sequence[int],
        reads: Mapping[str, Part | PartKey] | None = None,
        reads_all: Mapping[str, Part | PartKey] | None = None,
        optional: bool = False,
    ) -> Part:
        """Declare a part.

        Its first module is called with what the caller passes for it, ``step(inputs={name: ...})``, where that is
        passed, and each later module with the output of the one before, as in a pipeline without a graph. What the part
        reads from other parts follows as keyword arguments, None for a part that the microbatch skips.

        Args:
            name: a text, unique in the graph.
            stages: the stage of each of its modules, in order, 0..N-1. A stage may hold several parts.
            reads: by keyword argument, the parts (or single values of their outputs) that the first module reads.
            reads_all: likewise, those that every module reads.
            optional: whether microbatches may skip it, by ``step(visits={name: [True, False, ...]})``. A skipped part
                runs no task.

        Returns:
            The part, for ``reads`` of others.

        Raises:
            ConfigError: naming the argument and the allowed values.
        """
        if type(name) is not str or not name or any(mark in name for mark in ".;,= \n"):
            raise ConfigError(f"part name is {name!r}, must be a text without spaces and any of . ; , =")
        if name in self.parts:
            raise ConfigError(f"part {name!r} is declared already, must have another name")
        flag(f"optional of part {name!r}", optional)
        first = self._checked_reads(name, "reads", reads)
        each = self._checked_reads(name, "reads_all", reads_all)
        if twice := sorted(first.keys() & each.keys()):
            raise ConfigError(f"part {name!r} names {twice[0]!r} in reads and in reads_all: must be in one of them")
        part = self.parts[name] = Part(name, _checked_stages(name, stages), first, each, optional)
        return part

    def _checked_reads(self, name: str, field: str, reads: object) -> Mapping[str, Part | PartKey]:
        if reads is None:
            return {}
        if not isinstance(reads, Mapping):
            raise ConfigError(
                f"{field} of part {name!r} is of type {type(reads).__name__}, must be a dict of parts by keyword"
            )
        for argument, read in reads.items():
            if type(argument) is not str or not argument.isidentifier() or keyword.iskeyword(argument):
                raise ConfigError(f"{field} of part {name!r} names {argument!r}, must name keyword arguments")
            if not isinstance(read, Part | PartKey):
                raise ConfigError(
                    f"{field}[{argument!r}] of part {name!r} is {read!r}, must be a part of this graph, which part() "
                    "returned, or one value of its output: part['key']"
                )
            if self.parts.get(part_of(read).name) is not part_of(read):
                raise ConfigError(
                    f"{field}[{argument!r}] of part {name!r} is part {part_of(read).name!r} of another graph, must be "
                    f"one of this graph: {_listed(self.parts)}"
                )
        return cast("Mapping[str, Part | PartKey]", reads)


def _checked_stages(name: str, stages: object) -> tuple[int, ...]:
    is_list = isinstance(stages, Sequence) and not isinstance(stages, str | bytes)
    listed = tuple(cast("Sequence[Any]", stages)) if is_list else ()
    if not listed or not all(type(stage) is int and stage >= 0 for stage in listed):
        raise ConfigError(f"stages of part {name!r} is {stages!r}, must be a list of at least one stage number >= 0")
    return listed


def _listed(names: Mapping[str, Part]) -> str:
    return ", ".join(names) or "none yet"
