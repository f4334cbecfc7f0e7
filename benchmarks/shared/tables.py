"""The cost tables of one step: on one chunk and on two, looped or in a V, with a whole or a split backward."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

from rrfp.costs import CostTable, make_costs
from rrfp.lab.generators.profiles import PLAIN_BYTES
from rrfp.model.placement import Layout

#: Chunks of a stage that has several.
CHUNKS = 2
#: Bytes that a microbatch of size 1 holds on a plain stage of one chunk; on others in proportion to its planned time.
HELD_BYTES = 16 << 20


class Form(StrEnum):
    """How a step's work is cut into tasks."""

    WHOLE = "whole"
    SPLIT = "split"
    V = "v"
    LOOPED = "looped"
    LOOPED_SPLIT = "looped, split"

    @property
    def is_split(self) -> bool:
        """Whether backward is split; it is in a V."""
        return self in (Form.SPLIT, Form.V, Form.LOOPED_SPLIT)

    @property
    def chunks(self) -> int:
        """Virtual stages of a rank."""
        return 1 if self in (Form.WHOLE, Form.SPLIT) else CHUNKS

    @property
    def layout(self) -> Layout:
        """Where the virtual stages lie."""
        return "v" if self is Form.V else "looped"


def make_table(
    form: Form, profile: str, stages: int, microbatches: int, *, seed: int, step: int, jitter: str
) -> CostTable:
    """The table of one step; those of one step and seed have the same microbatches and bytes in every form."""
    table = make_costs(
        profile,
        stages,
        microbatches,
        chunks=form.chunks,
        placement=form.layout,
        split=form.is_split,
        seed=seed,
        step=step,
        jitter=jitter,
        sized=True,
    )
    return replace(table, held=None if table.held is None else table.held * (HELD_BYTES / PLAIN_BYTES))


def scaled(table: CostTable, factor: float) -> CostTable:
    """The same tasks, each ``factor`` times as long."""
    weight = None if table.weight is None else factor * table.weight
    return replace(table, forward=factor * table.forward, backward=factor * table.backward, weight=weight)
