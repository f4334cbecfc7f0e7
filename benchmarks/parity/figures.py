"""How far trainings are apart: which have the bits of one process, and the others' difference beside that of seeds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from benchmarks.parity.settings import METHODS, ONE_PROCESS

#: Of the losses that are kept of a training: every so many iterations.
KEPT_EVERY = 10


@dataclass(frozen=True, slots=True)
class Outcome:
    """One training; `worker.py` reports it."""

    model: str
    seed: int
    method: str
    losses: tuple[float, ...]
    evaluations: tuple[tuple[int, float], ...]
    sha256: str
    seconds: float

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Self:
        """Read a worker's line."""
        pairs = tuple((int(number), float(loss)) for number, loss in plain["evaluations"])
        return cls(**{**plain, "losses": tuple(plain["losses"]), "evaluations": pairs})


@dataclass(frozen=True, slots=True)
class Row:
    """A training beside that of one process from the same seed.

    Attributes:
        model: its name.
        seed: of both.
        method: its name.
        fixes_bits: whether it is to have the same bits.
        sha256: of all losses and parameters.
        same_bits: whether it is one process's.
        last: the last evaluation's loss.
        largest: the largest difference of an iteration's loss.
        largest_evaluated: the largest difference of an evaluation's loss.
        of_spread: the largest difference of an evaluation's loss over the spread of seeds there; None with one seed.
    """

    model: str
    seed: int
    method: str
    fixes_bits: bool
    sha256: str
    same_bits: bool
    last: float
    largest: float
    largest_evaluated: float
    of_spread: float | None


def rows_of(outcomes: Sequence[Outcome]) -> Iterator[Row]:
    """One for each training that has one process beside it."""
    references = {(each.model, each.seed): each for each in outcomes if each.method == ONE_PROCESS}
    for each in outcomes:
        if (other := references.get((each.model, each.seed))) is None:
            continue
        differences = differences_of(each, other)
        spreads = spread_of(outcomes, each.model)
        yield Row(
            each.model,
            each.seed,
            each.method,
            METHODS[each.model][each.method].fixes_bits,
            each.sha256,
            each.sha256 == other.sha256,
            each.evaluations[-1][1],
            max(abs(own - reference) for own, reference in zip(each.losses, other.losses, strict=True)),
            max(differences),
            max(own / spread for own, spread in zip(differences, spreads, strict=True)) if spreads else None,
        )


def differences_of(own: Outcome, other: Outcome) -> list[float]:
    """Of two trainings' evaluations."""
    return [abs(mine - theirs) for (_, mine), (_, theirs) in zip(own.evaluations, other.evaluations, strict=True)]


def spread_of(outcomes: Sequence[Outcome], model: str) -> list[float]:
    """By evaluation, the largest difference between two seeds in one process; empty with one seed."""
    seeds = [each.evaluations for each in outcomes if each.model == model and each.method == ONE_PROCESS]
    if len(seeds) < 2:
        return []
    return [max(loss for _, loss in each) - min(loss for _, loss in each) for each in zip(*seeds, strict=True)]


def document_of(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The results as plain data."""
    trainings = [
        {**asdict(each), "losses": each.losses[KEPT_EVERY - 1 :: KEPT_EVERY], "iterations": len(each.losses)}
        for each in outcomes
    ]
    return {"rows": [asdict(row) for row in rows_of(outcomes)], "trainings": trainings}
