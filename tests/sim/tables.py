"""Cost tables for tests: written out by hand, or random ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from rrfp.core.placement import Layout
from rrfp.costs import CostTable

Rows = Sequence[Sequence[float]]


def table(
    forward: Rows,
    backward: Rows,
    weight: Rows | None = None,
    *,
    latency: float = 0.0,
    chunks: int = 1,
    placement: Layout = "looped",
) -> CostTable:
    """A row a virtual stage, a column a microbatch, one latency for every message."""
    edges = np.full((len(forward) - 1, len(forward[0])), latency)
    split = None if weight is None else np.array(weight)
    rows = np.array(forward), np.array(backward), split, edges, edges
    return CostTable(len(forward) // chunks, chunks, placement, len(forward[0]), *rows)


@st.composite
def tables(draw: st.DrawFn, *, most_chunks: int = 2) -> CostTable:
    """Small tables full of ties and zeros, or of arbitrary times."""
    stages, chunks = draw(st.integers(1, 4)), draw(st.integers(1, most_chunks))
    microbatches, is_split = draw(st.integers(1, 5)), draw(st.booleans())
    placement: Layout = draw(st.sampled_from(["looped", "v"]))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    levels = draw(st.sampled_from([[0.0], [0.0, 1.0], [1.0, 2.0, 4.0], None]))

    def matrix(rows: int) -> np.ndarray:
        shape = (rows, microbatches)
        return random.exponential(1e-2, shape) if levels is None else random.choice(levels, shape)

    count = stages * chunks
    weight = matrix(count) if is_split else None
    forward, backward, there, back = matrix(count), matrix(count), matrix(count - 1), matrix(count - 1)
    return CostTable(stages, chunks, placement, microbatches, forward, backward, weight, there, back)
