"""Recorded steps without one cause of their length, at the same work: what the others leave.

No trace says how much of a task's time is the size of its microbatch, and how much is jitter. What tasks of a
microbatch have in common over virtual stages and kinds is taken for its size: the components of the logarithms of all
times (a row a virtual stage and kind, a column a microbatch) whose singular values are larger than those of noise, by
the rule of Gavish and Donoho (2014) for noise of unknown strength.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rrfp.costs.table import Bits, CostTable, Matrix
from rrfp.lab.advice.recorded import RecordedStep, Rows, with_durations
from rrfp.model.tasks import B, W

#: A link is slow if its messages take this many times those of the middle link.
SLOW_LINK = 2.0


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """How the times of tasks of one row differ, by step: factors around 1, a row a kind and virtual stage."""

    #: By the size of the microbatch.
    sizes: tuple[Matrix, ...]
    #: For no known reason.
    jitter: tuple[Matrix, ...]


def factors_of(steps: Sequence[RecordedStep]) -> Factors:
    """What the tasks of all steps have in common by microbatch, and the rest."""
    logs = [_centred(_stacked(step.costs)) for step in steps]
    whole = np.concatenate(logs, axis=1)
    left, values, right = np.linalg.svd(whole, full_matrices=False)
    kept = values > _noise(whole.shape, values)
    common = left[:, kept] * values[kept] @ right[kept]
    cuts = np.cumsum([each.shape[1] for each in logs])[:-1]
    sizes = np.split(common, cuts, axis=1)
    rest = [log - size for log, size in zip(logs, sizes, strict=True)]
    return Factors(tuple(map(np.exp, sizes)), tuple(map(np.exp, rest)))


def _stacked(costs: CostTable) -> Matrix:
    return np.concatenate(list(costs.durations.values()))


def _centred(rows: Matrix) -> Matrix:
    """Logarithms around 0 in each row; 0 for tasks that take no time."""
    logs = np.zeros_like(rows)
    for log, row in zip(logs, rows, strict=True):
        lasts = row > 0
        if lasts.any():
            log[lasts] = np.log(row[lasts]) - np.log(row[lasts]).mean()
    return logs


def _noise(shape: tuple[int, ...], values: Matrix) -> float:
    """The largest singular value that noise may have."""
    ratio = min(shape) / max(shape)
    factor = 0.56 * ratio**3 - 0.95 * ratio**2 + 1.82 * ratio + 1.43
    return float(factor * np.median(values))


def _divided(costs: CostTable, factors: Matrix) -> CostTable:
    """The table with its times divided, and the sum of each row as before."""
    rows = _stacked(costs)
    divided = rows / factors
    sums = divided.sum(axis=1, keepdims=True)
    divided *= np.divide(rows.sum(axis=1, keepdims=True), sums, out=np.ones_like(sums), where=sums > 0)
    parts = np.split(divided, len(costs.durations))
    return with_durations(costs, dict(zip(costs.durations, parts, strict=True)))


def without_sizes(steps: Sequence[RecordedStep], factors: Factors) -> list[RecordedStep]:
    pairs = zip(steps, factors.sizes, strict=True)
    return [replace(step, costs=_divided(step.costs, sizes)) for step, sizes in pairs]


def without_jitter(steps: Sequence[RecordedStep], factors: Factors) -> list[RecordedStep]:
    """Tasks that take what their microbatch and stage say, and messages of one link that take the same."""
    changed = []
    for step, jitter in zip(steps, factors.jitter, strict=True):
        costs = step.costs
        used = costs.used()
        even: Mapping[str, Any] = {
            name: np.where(used, _means(getattr(costs, name), used), 0.0)
            for name in ("latency_forward", "latency_backward")
        }
        changed.append(replace(step, costs=replace(_divided(costs, jitter), **even)))
    return changed


def _means(rows: Matrix, used: Bits) -> Matrix:
    counts = np.maximum(1, used.sum(axis=1, keepdims=True))
    means: Matrix = np.where(used, rows, 0.0).sum(axis=1, keepdims=True) / counts
    return means


def work(steps: Sequence[RecordedStep]) -> Matrix:
    """Seconds of compute of each stage in the mean step."""
    total: Matrix = np.mean([step.costs.work() for step in steps], axis=0)
    return total


def with_work(steps: Sequence[RecordedStep], wanted: Matrix) -> list[RecordedStep]:
    """Stages that compute for ``wanted`` seconds in the mean step."""
    now = work(steps)
    factors = np.divide(wanted, now, out=np.ones_like(now), where=now > 0)
    changed = []
    for step in steps:
        costs = step.costs
        column = factors[[costs.stage_of(v) for v in range(costs.num_virtual_stages)], np.newaxis]
        rows: Rows = {kind: own * column for kind, own in costs.durations.items()}
        changed.append(replace(step, costs=with_durations(costs, rows)))
    return changed


def without_gaps(steps: Sequence[RecordedStep], *names: str) -> list[RecordedStep]:
    changed = []
    for step in steps:
        none = {kind: np.zeros_like(rows) for kind, rows in step.dispatch.items()}
        gone: Mapping[str, Any] = dict.fromkeys(names, none)
        changed.append(replace(step, **gone))
    return changed


def without_ends(steps: Sequence[RecordedStep]) -> list[RecordedStep]:
    return [replace(step, opening={}, closing=0.0) for step in steps]


# Messages.

#: Two stages, the lower one first.
Link = tuple[int, int]


def links(steps: Sequence[RecordedStep]) -> Mapping[Link, float]:
    """Seconds of the mean message between each two stages that exchange any."""
    costs = steps[0].costs
    times: dict[Link, list[Matrix]] = {}
    for step in steps:
        used = step.costs.used()
        for e, link in enumerate(_links_of(costs)):
            if link is not None:
                rows = (step.costs.latency_forward[e], step.costs.latency_backward[e])
                times.setdefault(link, []).extend(row[used[e]] for row in rows)
    found = {link: np.concatenate(own) for link, own in times.items()}
    return {link: float(own.mean()) for link, own in sorted(found.items()) if own.size}


def _links_of(costs: CostTable) -> list[Link | None]:
    """By edge; None inside a stage."""
    stages = [(costs.stage_of(u), costs.stage_of(v)) for u, v in costs.edges()]
    return [None if a == b else (min(a, b), max(a, b)) for a, b in stages]


def slow_links(means: Mapping[Link, float]) -> dict[Link, float]:
    """The links that are slow beside the others, with the seconds of the middle one of these."""
    slow = {}
    for link, seconds in means.items():
        others = [other for name, other in means.items() if name != link]
        if others and seconds > SLOW_LINK * (middle := float(np.median(others))):
            slow[link] = middle
    return slow


def with_messages(steps: Sequence[RecordedStep], factors: Mapping[Link, float]) -> list[RecordedStep]:
    changed = []
    for step in steps:
        column = np.array([1.0 if link is None else factors.get(link, 1.0) for link in _links_of(step.costs)])
        there, back = (
            rows * column[:, np.newaxis] for rows in (step.costs.latency_forward, step.costs.latency_backward)
        )
        changed.append(replace(step, costs=replace(step.costs, latency_forward=there, latency_backward=back)))
    return changed


# Backward as another option of the job divides it.

#: The parts of a whole backward that its weight gradients may take: nobody has measured them.
WEIGHT_PARTS = (1 / 3, 1 / 2)


def split_backward(steps: Sequence[RecordedStep], part: float) -> list[RecordedStep]:
    """Weight gradients as tasks of their own, each dispatched as its backward."""
    changed = []
    for step in steps:
        rows = step.costs.durations
        costs = with_durations(step.costs, {**rows, B: rows[B] * (1 - part), W: rows[B] * part})
        dispatch, order = ({**gaps, W: gaps[B]} for gaps in (step.dispatch, step.order))
        changed.append(replace(step, costs=costs, dispatch=dispatch, order=order))
    return changed
