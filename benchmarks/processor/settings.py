"""What is compared, and where."""

from __future__ import annotations

from dataclasses import dataclass

TORCH, SCHEDULE, PIPELINE = "torch", "ScheduleRRFP", "Pipeline"
LOOP, LANE, OTHER = "loop", "lane", "others"


@dataclass(frozen=True, slots=True)
class Case:
    """One layout; every system runs it in turns."""

    name: str
    ranks: int
    chunks: int
    #: Of a message between two stages, float32.
    elements: int
    microbatches: int = 32
    warm_up: int = 3
    steps: int = 10
    rounds: int = 8


CASES = (
    Case("1 rank, 2 chunks, no messages", 1, 2, 1024),
    Case("2 ranks, messages of 4 KiB", 2, 1, 1024),
    Case("2 ranks, messages of 2 MiB", 2, 1, 512 * 1024, steps=4),
)
