"""Jitter: seeded delays of single tasks, by the formula of the paper's Table 6.

A stage keeps a running average e of its task times c: e = 0.9 e + 0.1 c. With probability p a task is lengthened by
alpha * max(floor, e) * (0.5 + U(0, 1)), and its lane is busy for the whole delay. The rules below make the delays the
same for every method, and comparable between levels:

- e follows the *un-jittered* times in the fixed order F0, B0, F1, B1, ..., whatever order a method runs. It starts at
  the first time, and the average that scales a delay includes the task's own time.
- The two uniforms of a task come from (seed, step, virtual stage, microbatch, kind) alone. The levels compare them with
  growing p, so a hit at J1 is a hit at J2 and J3.
- If backward is split, c is B + W, and the whole delay falls on B: a stall happens once, and delays the gradient as in
  the unsplit backward. Merging B and W therefore gives the unsplit table.
- With C chunks every virtual stage has its own average and uniforms, and the floor is divided by C: its tasks
  are 1/C as long. So C short tasks are delayed as much together, on average, as one whole task.
"""

from dataclasses import dataclass, replace

import numpy as np

from rrfp.costs.table import CostTable, Matrix
from rrfp.lab.generators.streams import RandomStream, generator
from rrfp.plain import one_of, whole

_OLD_WEIGHT, _NEW_WEIGHT = 0.9, 0.1


@dataclass(frozen=True, slots=True)
class JitterLevel:
    """One row of the paper's Table 6."""

    #: p: the chance that a task is lengthened.
    probability: float
    #: B in the paper: the smallest average that scales a delay, in seconds.
    floor: float
    #: alpha: the mean delay in units of max(floor, average).
    scale: float


JITTER_LEVELS = {
    "J0": JitterLevel(0.0, 0.0, 0.0),
    "J1": JitterLevel(0.1, 0.005, 0.5),
    "J2": JitterLevel(0.2, 0.010, 1.0),
    "J3": JitterLevel(0.3, 0.015, 1.5),
}


def with_jitter(table: CostTable, level: str, *, seed: int = 0, step: int = 0) -> CostTable:
    """The same step with its tasks lengthened, split or not; ``level`` is a name in `JITTER_LEVELS`.

    Every step has its own hits. An unknown level, or a negative seed or step, is a ConfigError.
    """
    seed, step = whole("seed", seed, 0), whole("step", step, 0)
    one_of(JITTER_LEVELS, "jitter", level)
    whole_backward = table.to_unsplit().backward
    chunks = [table.chunks_of(table.stage_of(v)) for v in range(table.num_virtual_stages)]
    floors = JITTER_LEVELS[level].floor / np.array(chunks, dtype=np.float64)
    delays = _delays(table.forward, whole_backward, JITTER_LEVELS[level], floors, seed, step)
    return replace(table, forward=table.forward + delays[0], backward=table.backward + delays[1])


def _delays(
    forward: Matrix, backward: Matrix, level: JitterLevel, floors: Matrix, seed: int, step: int
) -> tuple[Matrix, Matrix]:
    """Seconds by which each F and B is lengthened, V x M."""
    # The last two axes are (F, B) and (hit, size). Microbatches are drawn in order, so M does not change the numbers.
    draws = [
        generator(RandomStream.JITTER, seed, step, v).random((forward.shape[1], 2, 2)) for v in range(len(forward))
    ]
    uniform = np.stack(draws)
    averages = _running_averages(np.stack([forward, backward], axis=2))
    hit = uniform[..., 0] < level.probability
    delays = np.where(
        hit, level.scale * np.maximum(floors[:, np.newaxis, np.newaxis], averages) * (0.5 + uniform[..., 1]), 0.0
    )
    return delays[..., 0], delays[..., 1]


def _running_averages(times: Matrix) -> Matrix:
    """The average e after each task, V x M x (F, B)."""
    averages = np.empty_like(times)
    average = times[:, 0, 0]
    for m in range(times.shape[1]):
        for kind in range(2):
            if m or kind:
                average = _OLD_WEIGHT * average + _NEW_WEIGHT * times[:, m, kind]
            averages[:, m, kind] = average
    return averages
