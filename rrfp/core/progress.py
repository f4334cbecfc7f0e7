"""What a stage tells about its own step: why it waits, and the most that it held."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class WaitCause(StrEnum):
    """Why a stage runs nothing."""

    INPUT = "input"  # no task has all its inputs (or a strict schedule waits for its next one)
    MEMORY = "memory"  # a forward has its inputs, and the limit keeps it out
    ORDER = "order"  # a task has its inputs here, and the group's order does not have it yet
    DRAINED = "drained"  # every task of the step was enqueued


@dataclass(frozen=True, slots=True)
class Peaks:
    """The most that a stage held in one step.

    Attributes:
        held: largest D, chunk tasks.
        num_bytes: largest sum of bytes held by microbatches in work.
        received: most outputs of other stages that had arrived and whose task had not started.
    """

    held: int = 0
    num_bytes: int = 0
    received: int = 0
