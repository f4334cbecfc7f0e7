"""A stage's report on its step: the cause of its waits, the memory that it holds, and the peaks of that."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import StrEnum


class WaitCause(StrEnum):
    """Why a stage runs nothing."""

    INPUT = "input"  # no task has all its inputs (or a strict schedule waits for its next one)
    MEMORY = "memory"  # a forward has its inputs, and the limit blocks it
    ORDER = "order"  # a task has its inputs here, and the group's order does not have it yet
    CHOICE = "choice"  # a backward could run, and the hint waits for a forward that is on its way
    DRAINED = "drained"  # every task of the step was enqueued


@dataclass(frozen=True, slots=True)
class Holding:
    """What a stage holds."""

    #: D, chunk tasks.
    held: int = 0
    #: Bytes of microbatches in work and of outputs on their way out.
    num_bytes: int = 0
    #: Outputs of other stages that have arrived and whose task has not started.
    received: int = 0
    #: Their bytes, which no limit counts.
    received_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Peaks(Holding):
    """The most of each that a stage held in one step; not necessarily at one time."""

    @classmethod
    def worst(cls, reports: Iterable[Peaks]) -> Peaks:
        """The most of each, over several ranks or steps; zeros for none."""
        by_field = zip(*([getattr(peaks, field.name) for field in fields(cls)] for peaks in reports), strict=True)
        return cls(*map(max, by_field))
