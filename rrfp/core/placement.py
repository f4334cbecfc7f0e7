"""Where virtual stages live."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from rrfp.errors import ConfigError

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
        for field, value in (("stages", self.stages), ("chunks", self.chunks)):
            if value < 1:
                raise ConfigError(f"{field} is {value}, must be at least 1")
        if self.layout not in get_args(Layout):
            raise ConfigError(f"placement is {self.layout!r}, must be one of: {', '.join(get_args(Layout))}")

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
