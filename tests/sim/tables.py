"""Cost tables for tests: written out by hand, or random ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from rrfp.costs import CostTable
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import Layout, TablePlacement

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


def graph_table(
    stage_of: Sequence[int],
    edges: Sequence[tuple[int, int]],
    forward: Rows,
    backward: Rows,
    *,
    latency: float | Rows = 0.0,
    skipped: Sequence[set[int]] = (),
) -> CostTable:
    """Of a graph: a row a virtual stage, a column a microbatch; one latency, or rows for both ways."""
    shape = (len(edges), len(forward[0]))
    rows = (
        np.full(shape, latency) if isinstance(latency, float | int) else np.array(latency, dtype=float).reshape(shape)
    )
    return CostTable.of_graph(
        TaskGraph(TablePlacement(tuple(stage_of)), tuple(edges)),
        len(forward[0]),
        forward=np.array(forward),
        backward=np.array(backward),
        latency_forward=rows,
        latency_backward=rows,
        skipped=tuple(map(frozenset, skipped)),
    )


@st.composite
def graph_tables(draw: st.DrawFn, *, has_skips: bool = True) -> CostTable:
    """Any edges between up to six virtual stages on up to three stages; full of ties and zeros, or arbitrary times."""
    count, microbatches = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    pairs = [(u, v) for v in range(count) for u in range(v)]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    drawn = draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    numbers = {stage: number for number, stage in enumerate(dict.fromkeys(drawn))}
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    levels = draw(st.sampled_from([[0.0, 1.0], [1.0, 2.0, 4.0], None]))

    def matrix(rows: int) -> np.ndarray:
        shape = (rows, microbatches)
        return random.exponential(1e-2, shape) if levels is None else random.choice(levels, shape)

    share = draw(st.sampled_from([0.0, 0.3])) if has_skips else 0.0
    skips = random.random((microbatches, count)) < share
    skips[skips.all(axis=1)] = False  # one that visits nothing is no microbatch
    sizes = {"weight": matrix(count)} if draw(st.booleans()) else {}
    sizes |= {"held": random.choice([1.0, 2.0, 5.0], (count, microbatches))} if draw(st.booleans()) else {}
    return CostTable.of_graph(
        TaskGraph(TablePlacement(tuple(numbers[stage] for stage in drawn)), tuple(edges)),
        microbatches,
        forward=matrix(count),
        backward=matrix(count),
        latency_forward=matrix(len(edges)),
        latency_backward=matrix(len(edges)),
        skipped=tuple(frozenset(np.flatnonzero(row).tolist()) for row in skips),
        **sizes,
    )
