"""Cost tables and cost files of graphs."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from batches import examples
from hypothesis import given
from sim.tables import graph_table, graph_tables

from rrfp.costs import CostTable, from_json, make_costs, to_json, with_jitter, with_latency
from rrfp.errors import ConfigError
from rrfp.lab.simulation import simulate
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import Placement

GOOD: dict[str, Any] = {
    "stages": 3,
    "microbatches": 2,
    "virtual_stages": ["vision", "audio", "lm.0", "lm.1"],
    "placement": [0, 1, 1, 2],
    "edges": ["vision -> lm.0", "audio -> lm.0", "lm.0 -> lm.1", "vision -> lm.1"],
    "skipped": {"vision": [1]},
    "F": [[1, 0], [2, 2], [3, 3], [4, 4]],
    "B": [[1, 0], [2, 2], [3, 3], [4, 4]],
    "latency_F": [[0.5, 0], [0, 0], [0.25, 0.25], [0.75, 0]],
    "latency_B": [[0.5, 0], [0, 0], [0.25, 0.25], [0.75, 0]],
}


def test_reads_the_documented_form_of_a_graph() -> None:
    costs = from_json(json.dumps(GOOD))
    assert costs.graph is not None
    assert costs.graph.names == ("vision", "audio", "lm.0", "lm.1")
    assert costs.edges() == ((0, 2), (1, 2), (2, 3), (0, 3))
    assert [costs.virtual_stages_of(stage) for stage in range(3)] == [(0,), (1, 2), (3,)]
    assert [costs.chunks_of(stage) for stage in range(3)] == [1, 2, 1]
    assert costs.skipped == (frozenset(), frozenset({0}))
    assert costs.num_tasks == 2 * 7
    assert costs.work().tolist() == [2, 20, 16]
    assert costs.used().tolist() == [[True, False], [True, True], [True, True], [True, False]]


@examples(60)
@given(graph_tables())
def test_a_file_returns_the_same_table(costs: CostTable) -> None:
    again = from_json(to_json(costs))
    assert again == costs
    assert to_json(again) == to_json(costs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"edges": ["vision - lm.0"]}, "edges[0] is 'vision - lm.0', must be 'NAME -> NAME'"),
        ({"edges": ["image -> lm.0"]}, "edges[0] names 'image', must be one of: vision, audio, lm.0, lm.1"),
        (
            {"edges": ["lm.1 -> lm.0"]},
            "edges[0] is 'lm.1 -> lm.0', must lead to a later one of virtual_stages",
        ),
        (
            {"edges": ["audio -> lm.0", "audio -> lm.0"]},
            "edges[1] is 'audio -> lm.0', which is given more than once",
        ),
        ({"edges": "vision -> lm.0"}, "edges is 'vision -> lm.0', must be a list of 'NAME -> NAME'"),
        (
            {"virtual_stages": ["vision", "vision", "lm.0", "lm.1"]},
            "virtual_stages[1] is 'vision', must be a name that no other has, without ' -> '",
        ),
        ({"virtual_stages": []}, "virtual_stages is empty, must have a name for each virtual stage"),
        ({"placement": [0, 1, 2]}, "placement has 3 entries, must have 4, one a virtual stage"),
        ({"placement": [0, 1, 1, 3]}, "placement[3] is 3, must be a whole number 0..2"),
        ({"placement": [0, 1, 1, 1]}, "placement has no virtual stage on stage 2, must have one on each of 3"),
        ({"placement": "looped"}, "placement is 'looped', must be a list of stages, one for each of virtual_stages"),
        ({"skipped": {"image": [1]}}, "skipped names 'image', must be one of: vision, audio, lm.0, lm.1"),
        ({"skipped": {"vision": [2]}}, "skipped['vision'] is 2, must be a whole number 0..1"),
        ({"skipped": [[0]]}, "skipped is [[0]], must be an object: NAME -> list of microbatches"),
        ({"F": [[1, 0]]}, "F has 1 rows, must have 4 (one a virtual stage)"),
        ({"sizes": [1]}, "sizes has 1 entries, must have 2, one a microbatch"),
        ({"latency_F": [[1, 0]]}, "latency_F has 1 rows, must have 4 (one an edge)"),
        (
            {"chunks": 1},
            "field 'chunks' is unknown, must be one of: stages, microbatches, virtual_stages, placement, edges, "
            "skipped, F, B, W, latency_F, latency_B, bytes, sizes",
        ),
    ],
)
def test_a_wrong_field_of_a_graph_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_json(json.dumps(GOOD | changes))
    assert str(caught.value) == message


@pytest.mark.parametrize("field", [name for name in GOOD if name not in ("skipped", "virtual_stages")])
def test_only_skipped_may_be_missing(field: str) -> None:
    rest = {name: value for name, value in GOOD.items() if name != field}
    with pytest.raises(ConfigError, match=f"^field {field} is missing$"):
        from_json(json.dumps(rest))


def test_what_a_table_has_for_skipped_tasks_does_not_count() -> None:
    one = graph_table([0, 1], [(0, 1)], [[7, 7], [1, 1]], [[7, 7], [1, 1]], latency=5, skipped=[{0}, set()])
    other = graph_table([0, 1], [(0, 1)], [[0, 7], [1, 1]], [[0, 7], [1, 1]], latency=[[0, 5]], skipped=[{0}, set()])
    assert one == other
    assert one.work().tolist() == [14, 4]
    assert one != graph_table([0, 1], [(0, 1)], [[0, 7], [1, 1]], [[0, 7], [1, 1]], latency=[[0, 5]])


def test_a_chain_written_as_a_graph_draws_the_same_jitter_and_latency() -> None:
    chain = make_costs("mllm", 3, 4, seed=5)
    placement = Placement(3)
    graph = CostTable.of_graph(
        TaskGraph(placement),
        4,
        forward=chain.forward,
        backward=chain.backward,
        latency_forward=chain.latency_forward,
        latency_backward=chain.latency_backward,
    )
    slow, same = (with_latency(with_jitter(each, "J2", seed=1), "spike", seed=1) for each in (chain, graph))
    assert np.array_equal(slow.forward, same.forward)
    assert np.array_equal(slow.latency_backward, same.latency_backward)
    assert graph.to_graph().edges == chain.to_graph().edges


def test_an_output_with_two_readers_on_a_stage_takes_the_longer_of_two_ways() -> None:
    # 0 and 1 are on stages of their own, 2 and 3 on stage 2; 0 -> 2 takes 1, 0 -> 3 takes 4, 1 -> 3 takes 2.
    costs = graph_table([0, 1, 2, 2], [(0, 2), (0, 3), (1, 3)], [[1]] * 4, [[1]] * 4, latency=[[1], [4], [2]])
    trace = simulate(costs, hint="bf").result.trace()
    assert {str(span.task): span.start for span in trace.tasks} == {
        **{"F0@0": 0.0, "F0@1": 0.0, "F0@2": 7.0, "F0@3": 5.0},
        **{"B0@3": 6.0, "B0@2": 8.0, "B0@1": 9.0, "B0@0": 11.0},
    }


def test_a_chain_has_no_way_round_a_virtual_stage() -> None:
    chain = make_costs("llm", 2, 1)
    with pytest.raises(ConfigError, match=r"^skipped must be empty without graph"):
        CostTable(
            2,
            1,
            "looped",
            1,
            chain.forward,
            chain.backward,
            None,
            chain.latency_forward,
            chain.latency_backward,
            skipped=(frozenset({0}),),
        )


def test_the_table_of_a_graph_names_a_virtual_stage_that_it_does_not_have() -> None:
    with pytest.raises(ConfigError, match=r"^skipped has virtual stage 2, must be 0\.\.1$"):
        graph_table([0, 1], [(0, 1)], [[1]] * 2, [[1]] * 2, skipped=[{2}])


def test_a_graphs_file_has_sizes_too() -> None:
    costs = from_json(json.dumps(GOOD | {"sizes": [512, 0.5]}))
    assert costs.sizes == (512.0, 0.5)
    assert from_json(to_json(costs)) == costs
    assert from_json(json.dumps(GOOD)).sizes is None
