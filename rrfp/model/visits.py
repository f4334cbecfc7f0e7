"""Which virtual stages each microbatch of a step visits: all of them, unless it skips some."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from rrfp.errors import ConfigError
from rrfp.model.tasks import Task

#: The virtual stages that a microbatch skips.
Skipped = frozenset[int]


@dataclass(frozen=True, slots=True)
class Visits:
    """The visits of one step.

    A microbatch runs no task on a virtual stage that it skips, and what would have read that output reads nothing in
    its place. So each microbatch has a graph of its own: the virtual stages that it visits, and the edges among them.

    Attributes:
        microbatches: M.
        skipped: for each microbatch the virtual stages that it does not visit. Empty: each one visits all.

    Raises:
        ConfigError: if ``skipped`` has neither no entry nor one a microbatch.
    """

    microbatches: int
    skipped: tuple[Skipped, ...] = ()

    def __post_init__(self) -> None:
        if self.skipped and len(self.skipped) != self.microbatches:
            raise ConfigError(
                f"skipped has {len(self.skipped)} entries, must have {self.microbatches}, one a microbatch"
            )
        if not any(self.skipped):
            object.__setattr__(self, "skipped", ())

    @property
    def are_partial(self) -> bool:
        """Whether any microbatch skips a virtual stage."""
        return bool(self.skipped)

    @property
    def patterns(self) -> frozenset[Skipped]:
        """What microbatches skip, each set once."""
        return frozenset(self.skipped or [frozenset()])

    def exists(self, task: Task) -> bool:
        """Whether the microbatch of ``task`` visits its virtual stage.

        Args:
            task: any task of the pipeline.
        """
        return task.virtual_stage not in self.skipped_by(task.microbatch)

    def skipped_by(self, microbatch: int) -> Skipped:
        """The virtual stages that ``microbatch`` skips.

        Args:
            microbatch: 0..M-1.
        """
        return self.skipped[microbatch] if self.skipped else frozenset()

    def visitors(self, virtual_stage: int) -> Collection[int]:
        """The microbatches that visit ``virtual_stage``.

        Args:
            virtual_stage: 0..V-1.
        """
        every = range(self.microbatches)
        return frozenset(every) - self.skippers(virtual_stage) if self.skipped else every

    def skippers(self, virtual_stage: int) -> frozenset[int]:
        """The microbatches that skip ``virtual_stage``.

        Args:
            virtual_stage: 0..V-1.
        """
        return frozenset(m for m, skipped in enumerate(self.skipped) if virtual_stage in skipped)
