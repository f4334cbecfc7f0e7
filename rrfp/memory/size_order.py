"""How closely a stage's task times follow the sizes of microbatches. Where they do, one order by size suits the stage.

Measured times scatter, and scatter alone makes a correlation smaller: under the simulator's jitter J2 one of 1 is
measured as 0.94. Scatter differs between a microbatch's forward and its backward, and what belongs to the microbatch
does not. So the correlation r between these two halves shows how reliable their sum is (Spearman and Brown: 2 r /
(1 + r)), and the correlation with the sizes over the root of that is what it would be without scatter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

#: Below it the halves have so little in common that the correction would be a guess: the correlation is left as it is.
LEAST_RELIABILITY = 0.5


def followed(sizes: Sequence[float], forward: Sequence[float], backward: Sequence[float]) -> float | None:
    """How closely the times of a stage follow the sizes of microbatches, scatter aside."""
    seconds = [sum(halves) for halves in zip(forward, backward, strict=True)]
    measured = correlation(sizes, seconds)
    halves = correlation(forward, backward)
    if measured is None or halves is None or halves <= 0:
        return measured
    reliability = 2 * halves / (1 + halves)
    if reliability < LEAST_RELIABILITY:
        return measured
    return max(-1.0, min(1.0, measured / math.sqrt(reliability)))


def correlation(sizes: Sequence[float], seconds: Sequence[float]) -> float | None:
    """Pearson's correlation of the sizes of microbatches with the time that each took on a stage.

    It is 0 where all times are equal, and None where all sizes are: there is nothing to order.
    """
    size_errors, time_errors = _errors(sizes), _errors(seconds)
    size_square, time_square = (math.fsum(error * error for error in each) for each in (size_errors, time_errors))
    if not size_square:
        return None
    if not time_square:
        return 0.0
    product = math.fsum(a * b for a, b in zip(size_errors, time_errors, strict=True))
    return max(-1.0, min(1.0, product / math.sqrt(size_square * time_square)))


def _errors(values: Sequence[float]) -> list[float]:
    """The distance of each value from the mean, over the largest distance, so that no square overflows or is lost."""
    mean = math.fsum(values) / len(values)
    errors = [value - mean for value in values]
    largest = max(map(abs, errors))
    return [error / largest for error in errors] if largest else errors


def least(correlations: Sequence[float | None]) -> float | None:
    """The least of all stages; None where a stage knows none."""
    known = [each for each in correlations if each is not None]
    return min(known) if known and len(known) == len(correlations) else None


def by_stage(rooms: Iterable[tuple[int, float | None]], stages: int) -> tuple[float | None, ...] | None:
    """The least room of each stage's ranks, given as (stage, room); None where no rank knows any."""
    known: list[list[float]] = [[] for _ in range(stages)]
    for stage, room in rooms:
        if room is not None:
            known[stage].append(room)
    return tuple(min(each, default=None) for each in known) if any(known) else None
