"""Where virtual stages live."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

from rrfp.errors import ConfigError
from rrfp.plain import one_of

Layout = Literal["looped", "v"]


@dataclass(frozen=True, slots=True)
class Placement:
    """The map between virtual stages and stages.

    Chunk r of stage i is virtual stage ``r * N + i`` when looped; with the V layout it is that for even r and
    ``r * N + (N - 1 - i)`` for odd r, so that consecutive chunks meet on the outer stages.

    Attributes:
        stages: N, at least 1.
        chunks: C, chunks a stage, at least 1.
        layout: ``"looped"`` or ``"v"``.

    Raises:
        ConfigError: on a count below 1 or an unknown layout.
    """

    stages: int
    chunks: int = 1
    layout: Layout = "looped"

    def __post_init__(self) -> None:
        for name, value in (("stages", self.stages), ("chunks", self.chunks)):
            if value < 1:
                raise ConfigError(f"{name} is {value}, must be at least 1")
        one_of(get_args(Layout), "placement", self.layout)

    @property
    def num_virtual_stages(self) -> int:
        """V = N * C."""
        return self.stages * self.chunks

    def stage_of(self, virtual_stage: int) -> int:
        """The stage that holds a virtual stage.

        Args:
            virtual_stage: 0..V-1.
        """
        chunk, position = divmod(virtual_stage, self.stages)
        return self.stages - 1 - position if self.layout == "v" and chunk % 2 else position

    def chunks_of(self, stage: int) -> int:
        """The number of virtual stages of a stage: C.

        Args:
            stage: 0..N-1.
        """
        return self.chunks

    def virtual_stages(self, stage: int) -> tuple[int, ...]:
        """The virtual stages of a stage, in chunk order (shallowest first).

        Args:
            stage: 0..N-1.
        """
        mirrored = self.stages - 1 - stage
        return tuple(
            chunk * self.stages + (mirrored if self.layout == "v" and chunk % 2 else stage)
            for chunk in range(self.chunks)
        )


@dataclass(frozen=True, slots=True)
class TablePlacement:
    """As `Placement`, for any map from virtual stages to stages, which may hold unequal numbers of chunks.

    Chunks of a stage are in the order of their virtual stages, so each comes after all that it reads.

    Attributes:
        table: for each virtual stage 0..V-1 its stage, 0..N-1. Every stage up to the highest one occurs.

    Raises:
        ConfigError: if the table is empty, or a stage below the highest one has no virtual stage.
    """

    #: No layout that a `Placement` or a generated schedule knows.
    layout: ClassVar[str] = "table"

    table: tuple[int, ...]
    #: N, one more than the highest stage of the table.
    stages: int = field(init=False)
    _by_stage: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.table:
            raise ConfigError("placement is an empty table, must name the stage of each virtual stage")
        missing = set(range(max(self.table) + 1)) - set(self.table)
        if missing or min(self.table) < 0:
            raise ConfigError(f"placement is {list(self.table)}, must have every stage from 0 to the highest one")
        by_stage: Sequence[list[int]] = [[] for _ in range(max(self.table) + 1)]
        for virtual_stage, stage in enumerate(self.table):
            by_stage[stage].append(virtual_stage)
        object.__setattr__(self, "stages", len(by_stage))
        object.__setattr__(self, "_by_stage", tuple(map(tuple, by_stage)))

    @property
    def num_virtual_stages(self) -> int:
        return len(self.table)

    @property
    def chunks(self) -> int:
        """C; a ConfigError where not all stages have equally many chunks."""
        counts = sorted({*map(len, self._by_stage)})
        if len(counts) > 1:
            raise ConfigError(f"stages have {counts[0]} to {counts[-1]} chunks, must have equally many here")
        return counts[0]

    def chunks_of(self, stage: int) -> int:
        return len(self._by_stage[stage])

    def stage_of(self, virtual_stage: int) -> int:
        return self.table[virtual_stage]

    def virtual_stages(self, stage: int) -> tuple[int, ...]:
        return self._by_stage[stage]
