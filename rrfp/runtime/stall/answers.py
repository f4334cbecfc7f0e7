"""The result of a survey: what a rank collects of all ranks. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rrfp.runtime.stall.status import RankStatus


@dataclass(frozen=True, slots=True)
class RankAnswer:
    """The answer of one rank, or why there is none.

    Attributes:
        rank: which.
        stage: its stage.
        name: its display name.
        status: its answer; None where none came in time.
        absent: why none came; empty where it came.
    """

    rank: int
    stage: int
    name: str
    status: RankStatus | None
    absent: str


@dataclass(frozen=True, slots=True)
class Survey:
    """All ranks, at about one time.

    Attributes:
        asker: the rank that asked.
        answers: by rank.
    """

    asker: int
    answers: tuple[RankAnswer, ...]
