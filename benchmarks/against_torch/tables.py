"""The cost tables of one step: whole, split, and cut for V placement.

V placement is for a model of 2 N layers of which each stage has two. On one chunk, stage i has the layers 2i and
2i + 1; in a V, virtual stage v is layer v alone, so that stage i has the layers i and 2N - 1 - i. `make_costs` gives
both chunks of a stage that stage's kind of work instead, as if a V moved no layer. So the table of a V is made here:
the layers 2i and 2i + 1 take half of stage i's time each. A layer's delays are drawn as for a stage, with the jitter's
floor halved: otherwise a stage of two short tasks would be delayed twice as long as one of a whole task.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

import numpy as np

from rrfp.costs import CostTable, make_costs, with_jitter
from rrfp.costs.streams import Matrix

#: Chunks of a stage in a V.
CHUNKS = 2


class Form(StrEnum):
    """How a step's work is cut into tasks."""

    WHOLE = "whole"
    SPLIT = "split"
    V = "v"

    @property
    def chunks(self) -> int:
        """Virtual stages of a rank."""
        return CHUNKS if self is Form.V else 1


def make_table(
    form: Form, profile: str, stages: int, microbatches: int, *, seed: int, step: int, jitter: str
) -> CostTable:
    """The table of one step; those of one step and seed have the same microbatches in every form."""
    if form is not Form.V:
        return make_costs(profile, stages, microbatches, split=form is Form.SPLIT, seed=seed, step=step, jitter=jitter)
    plain = make_costs(profile, stages, microbatches, split=True, seed=seed, step=step)
    assert plain.weight is not None
    none = np.zeros((CHUNKS * stages - 1, microbatches))
    layers = CostTable(
        stages=stages,
        chunks=CHUNKS,
        placement="v",
        microbatches=microbatches,
        forward=_per_layer(plain.forward),
        backward=_per_layer(plain.backward),
        weight=_per_layer(plain.weight),
        latency_forward=none,
        latency_backward=none,
    )
    # A delay is a multiple of max(floor, average). With times doubled before and halved after it, the floor is halved.
    return scaled(with_jitter(layers, jitter, seed=seed, step=step), 1 / CHUNKS)


def _per_layer(rows: Matrix) -> Matrix:
    """One row for each layer: those of a stage are alike, and take the whole stage's time for now."""
    return np.repeat(rows, CHUNKS, axis=0)


def scaled(table: CostTable, factor: float) -> CostTable:
    """The same tasks, each ``factor`` times as long."""
    weight = None if table.weight is None else factor * table.weight
    return replace(table, forward=factor * table.forward, backward=factor * table.backward, weight=weight)
