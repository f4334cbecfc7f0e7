"""How far a stage is from the sink, for hints and the limit "1f1b", and what depends on a chunk on its own stage."""

from __future__ import annotations

import pytest

from rrfp.memory.admission import Limit
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import Layout, Placement, TablePlacement


@pytest.mark.parametrize("stages", [1, 2, 3, 8])
@pytest.mark.parametrize(("chunks", "layout"), [(1, "looped"), (2, "looped"), (3, "looped"), (2, "v"), (3, "v")])
def test_on_a_chain_it_is_what_1f1b_holds(stages: int, chunks: int, layout: Layout) -> None:
    graph = TaskGraph.chain(stages, chunks=chunks, layout=layout)
    assert [graph.distance_to_sink(stage) for stage in range(stages)] == [stages - stage for stage in range(stages)]


def test_skip_edges_change_nothing_on_a_chain() -> None:
    graph = TaskGraph(Placement(4), ((0, 1), (0, 3), (1, 2), (2, 3)))
    assert [graph.distance_to_sink(stage) for stage in range(4)] == [4, 3, 2, 1]


@pytest.mark.parametrize(
    ("table", "edges", "distances"),
    [
        ((0, 1, 2, 3, 4), ((0, 1), (1, 3), (2, 3), (3, 4)), [4, 3, 3, 2, 1]),  # two encoders
        ((0, 1, 2, 3), ((0, 1), (0, 2), (1, 3), (2, 3)), [3, 2, 2, 1]),  # a diamond
        ((0, 1, 0, 1), ((0, 1), (0, 2), (1, 2), (2, 3)), [2, 1]),  # an encoder beside the model
        ((1, 0), ((0, 1),), [1, 2]),  # a chain that begins on stage 1
        ((0, 1, 0, 1, 2), ((0, 1), (1, 2), (2, 3), (3, 4)), [3, 2, 1]),  # the model goes on further than the encoder
        ((0, 1, 2), ((0, 1), (0, 2)), [2, 1, 1]),  # two sinks
    ],
)
def test_on_a_graph_it_is_the_longest_way_over_stages_that_are_new(
    table: tuple[int, ...], edges: tuple[tuple[int, int], ...], distances: list[int]
) -> None:
    graph = TaskGraph(TablePlacement(table), edges)
    assert [graph.distance_to_sink(stage) for stage in range(len(distances))] == distances


def test_the_limit_1f1b_holds_as_many_microbatches() -> None:
    assert Limit.resolve("1f1b", 0, 8) == Limit(8)
    assert Limit.resolve("1f1b", 2, 5, distance=3) == Limit(3)
    for spec, limit in (("n", Limit(5)), ("2n", Limit(10)), (4, Limit(4)), (None, Limit()), (Limit(7), Limit(7))):
        assert Limit.resolve(spec, 2, 5, distance=3) == limit


def test_what_depends_on_a_chunk_is_found_on_its_stage_only_and_over_any_way() -> None:
    graph = TaskGraph(TablePlacement((0, 1, 0, 0, 1)), ((0, 1), (1, 3), (2, 3), (3, 4)))
    assert [graph.dependants_here(v) for v in range(5)] == [(3,), (4,), (3,), (), ()]
