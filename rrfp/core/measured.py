"""What the tasks of a virtual stage have shown so far, as plain records: it outlives the pipeline in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Largest:
    """The largest sizes of one chunk.

    Attributes:
        held: bytes that one microbatch held after a task, with the task's output.
        growth: bytes that a backward added to what the forward had left.
        growth_share: the same, over what the forward had left.
    """

    held: int = 0
    growth: int = 0
    growth_share: float = 0.0

    def cover(self, held: int = 0, growth: int = 0, growth_share: float = 0.0) -> None:
        """Be at least this large."""
        self.held = max(self.held, held)
        self.growth = max(self.growth, growth)
        self.growth_share = max(self.growth_share, growth_share)


@dataclass(frozen=True, slots=True)
class Spent:
    """The measured durations of one kind of task.

    Attributes:
        kind: F, B or W.
        count: how many tasks were measured.
        seconds: their sum.
    """

    kind: str
    count: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements on one virtual stage.

    Attributes:
        virtual_stage: 0..V-1.
        durations: by kind.
        training_sizes: of the newest training steps, oldest first; empty without a limit on bytes.
        evaluation_sizes: the same of evaluations.
    """

    virtual_stage: int
    durations: tuple[Spent, ...] = ()
    training_sizes: tuple[Largest, ...] = ()
    evaluation_sizes: tuple[Largest, ...] = ()
