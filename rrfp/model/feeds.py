"""What each virtual stage is called with, and which part of an output each of its readers gets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple


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
