"""Placement by table, which stages of a graph are plain, and which memory rule each stage follows."""

from __future__ import annotations

import pytest

from rrfp.errors import ConfigError
from rrfp.memory.admission import Limit, rule_of
from rrfp.memory.rules import RuleContext
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import Placement, TablePlacement
from rrfp.model.tasks import Mode
from rrfp.model.visits import Visits

LIMIT, PAPER = Limit(2), Limit(2, rule="paper")


def graph_of(edges: str, table: tuple[int, ...]) -> TaskGraph:
    """The graph of edges written as ``"01 12"``."""
    return TaskGraph(TablePlacement(table), tuple((int(edge[0]), int(edge[1])) for edge in edges.split()))


def test_a_table_places_virtual_stages_anywhere() -> None:
    placement = TablePlacement((0, 1, 0, 2, 0))
    assert (placement.stages, placement.num_virtual_stages) == (3, 5)
    assert [placement.virtual_stages(stage) for stage in range(3)] == [(0, 2, 4), (1,), (3,)]
    assert [placement.chunks_of(stage) for stage in range(3)] == [3, 1, 1]
    assert [placement.stage_of(v) for v in range(5)] == [0, 1, 0, 2, 0]


def test_a_table_has_one_number_of_chunks_only_where_all_stages_have_it() -> None:
    assert TablePlacement((1, 0, 0, 1)).chunks == 2
    with pytest.raises(ConfigError, match="stages have 1 to 2 chunks, must have equally many here"):
        _ = TablePlacement((1, 0, 0)).chunks


@pytest.mark.parametrize("table", [(0, 2), (-1, 0), (1,)])
def test_a_table_with_a_stage_left_out_is_refused(table: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="must have every stage from 0 to the highest one"):
        TablePlacement(table)


def test_an_empty_table_is_refused() -> None:
    with pytest.raises(ConfigError, match="placement is an empty table"):
        TablePlacement(())


def test_a_table_that_says_the_same_behaves_as_the_layout() -> None:
    looped, table = TaskGraph(Placement(2, 2)), TaskGraph(TablePlacement((0, 1, 0, 1)))
    assert (looped.edges, looped.stage_of, looped.split) == (table.edges, table.stage_of, table.split)


def plain_stages(graph: TaskGraph, *skipped: frozenset[int], everywhere: bool = True) -> set[int]:
    """The stages that take the staircase in any order: microbatches skip these; ``everywhere``, one skips nothing."""
    patterns = (*skipped, frozenset[int]()) if everywhere else skipped
    of_stages = rules(graph, LIMIT, patterns, is_forced=False)
    return {stage for stage, rule in enumerate(of_stages) if rule == "S"}


@pytest.mark.parametrize(
    ("edges", "table", "plain"),
    [
        ("01 12 23", (0, 1, 2, 3), {0, 1, 2, 3}),  # a chain
        ("01 12 23 03", (0, 1, 2, 3), {0, 1, 2, 3}),  # with a skip edge
        ("01 02 03", (0, 1, 2, 3), {0, 1, 2, 3}),  # a tree
        ("02 12 23", (0, 1, 2, 3), {2, 3}),  # two sources: what follows the join is plain
        ("01 02 13 23", (0, 1, 2, 3), {3}),  # a diamond: above the branches is not
        ("02 12 23", (0, 1, 2, 0), set()),  # a stage is plain with all its chunks, and all below it
        ("02 12 23", (0, 1, 1, 2), {2}),
        ("12", (0, 1, 2), {0, 1, 2}),  # a virtual stage beside the rest joins nothing
        ("02 12 34", (0, 1, 2, 3, 0), {2}),  # stage 3 has stage 0 below it, which is not plain
    ],
)
def test_stages_are_plain_where_nothing_below_joins_a_branch_beside_them(
    edges: str, table: tuple[int, ...], plain: set[int]
) -> None:
    assert plain_stages(graph_of(edges, table)) == plain


def test_a_microbatch_that_skips_part_of_a_chain_makes_a_join_of_the_edge_round_it() -> None:
    graph = graph_of("01 12 23 03", (0, 1, 2, 3))
    assert plain_stages(graph, frozenset({1, 2})) == {0, 1, 2, 3}
    assert plain_stages(graph, frozenset({1})) == {3}


def test_a_join_that_no_microbatch_visits_is_none() -> None:
    graph = graph_of("02 12 23", (0, 1, 2, 3))
    assert plain_stages(graph, frozenset({0}), frozenset({1}), everywhere=False) == {0, 1, 2, 3}


TWO_SOURCES = graph_of("02 12", (0, 1, 2))


def rules(
    graph: TaskGraph,
    limit: Limit,
    skipped: tuple[frozenset[int], ...] = (),
    *,
    is_forced: bool,
    mode: Mode = Mode.TRAIN,
) -> str:
    """For each stage the first letter of its rule: staircase, reserve, paper or banker."""
    visits = Visits(len(skipped) or 2, skipped)
    contexts = (RuleContext(graph, v, visits, mode, is_forced) for v in range(graph.placement.stages))
    return "".join(rule_of(limit.rule, context).__name__[0] for context in contexts)


def test_chains_keep_their_rule_in_any_order_under_any_limit() -> None:
    for limit in (LIMIT, PAPER, Limit(), Limit(bytes=9)):
        for graph in (
            TaskGraph.chain(3),
            TaskGraph.chain(3, chunks=2, layout="v"),
            TaskGraph(Placement(3), ((0, 1), (1, 2), (0, 2))),
        ):
            for is_forced in (False, True):
                ordered = "R" if is_forced else "S"
                is_papers = limit is PAPER and graph.placement.chunks > 1
                assert rules(graph, limit, is_forced=is_forced) == ("P" if is_papers else ordered) * 3
                assert rules(graph, limit, is_forced=is_forced, mode=Mode.FORWARD) == ordered * 3


def test_on_other_graphs_the_banker_applies_where_it_must_and_everywhere_in_a_forced_order() -> None:
    assert rules(TWO_SOURCES, LIMIT, is_forced=False) == "BBS"
    assert rules(TWO_SOURCES, LIMIT, is_forced=True) == "BBB"
    assert rules(TaskGraph.chain(3), LIMIT, (frozenset({1}), frozenset()), is_forced=False) == "SSS"
    assert rules(TaskGraph.chain(3), LIMIT, (frozenset({1}), frozenset()), is_forced=True) == "BBB"


def test_the_papers_rule_holds_for_stages_of_several_chunks_only() -> None:
    assert rules(graph_of("02 12", (0, 1, 0)), PAPER, is_forced=False) == "PB"
    assert rules(graph_of("01 12", (0, 1, 0)), PAPER, is_forced=False) == "PB"
    assert rules(TWO_SOURCES, PAPER, is_forced=False) == "BBB"
    assert rules(TWO_SOURCES, LIMIT, is_forced=False) == "BBS"
