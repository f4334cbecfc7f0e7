"""The real shell in virtual time and the engine tell the same of graphs too, to the last bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from batches import examples
from hypothesis import event, given
from hypothesis import strategies as st
from sim.shell.runs import run_shell
from sim.tables import graph_table, graph_tables
from sim.test_shell_equals_engine import Case, named

from rrfp.engine.engine import run
from rrfp.engine.record import EngineResult
from rrfp.hints.registry import hint_names
from rrfp.lab.generators.multimodal import GraphName, multimodal_costs
from rrfp.memory.admission import Limit
from rrfp.model.tasks import Kind
from rrfp.schedules.registry import schedule_names

#: Schedules know chains only.
HINTS = [name for name in hint_names() if name not in schedule_names()]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    costs = draw(graph_tables())
    hint = draw(st.sampled_from(HINTS))
    limit = draw(st.sampled_from([Limit(), Limit(1), Limit(2), Limit(3, rule="paper")]))
    counts_bytes = costs.held is not None and draw(st.booleans())
    if counts_bytes:
        limit = Limit(draw(st.none() | st.integers(1, 3)), draw(st.integers(1, 15)))
    sizes = draw(st.none() | st.tuples(*[st.sampled_from([1.0, 2.0, 7.5])] * costs.microbatches))
    forced = [(kind, v) for v in range(costs.num_virtual_stages) for kind in (Kind.F, Kind.B)]
    in_order = draw(st.just([]) | st.lists(st.sampled_from(forced), max_size=4))
    takes_offers = draw(st.booleans())
    return Case(costs, named(hint), (limit,) * costs.stages, hint, sizes, in_order, takes_offers)


@examples(150)
@given(cases())
def test_shell_and_engine_tell_the_same_of_any_graph(case: Case) -> None:
    expected = case.outcome(run)
    event(case.method)
    event("with skips" if case.costs.skipped else "without skips")
    event("ran" if isinstance(expected, EngineResult) else expected.__name__)
    assert case.outcome(run_shell) == expected


@pytest.mark.parametrize("graph", ["branch", "colocated"])
@pytest.mark.parametrize("limit", [Limit(1), Limit(bytes=8_000_000)], ids=["count", "bytes"])
def test_they_agree_on_a_model_with_three_parts(graph: GraphName, limit: Limit) -> None:
    costs = multimodal_costs(graph, 4, 8, seed=2, latency="spike", split=True)
    case = Case(costs, named("slot-aware-pyramid"), (limit,) * 4)
    expected = case.outcome(run)
    assert isinstance(expected, EngineResult)
    assert case.outcome(run_shell) == expected


def test_a_stage_that_every_microbatch_skips_takes_part() -> None:
    costs = graph_table([0, 1], [(0, 1)], [[5, 5], [1, 1]], [[5, 5], [1, 1]], latency=1, skipped=[{0}, {0}])
    case = Case(costs, named("bf"), (Limit(1),) * 2)
    expected = case.outcome(run)
    assert isinstance(expected, EngineResult)
    assert [len(stage) for stage in expected.spans] == [0, 4]
    assert case.outcome(run_shell) == expected
    assert replace(case, takes_offers=True).outcome(run_shell) == expected
