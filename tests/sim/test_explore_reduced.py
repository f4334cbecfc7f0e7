"""Leaving out orders that cannot matter changes neither the deadlocks nor the peaks that are found."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from batches import long
from sim.graph_cases import GRAPH_RULES, GraphCase, everywhere, graphs_of, slots_of

from rrfp.lab.explore.cases import RULE_NAMES, Backward, Grid, random_visits
from rrfp.lab.explore.search import Exploration, Oracles, explore
from rrfp.memory.admission import Limit
from rrfp.memory.rules import Reserve, Staircase
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import Placement
from rrfp.model.tasks import Kind, Mode


def what_matters(found: Exploration) -> tuple[Any, ...]:
    """The peaks, and of each deadlock what ran by then, for microbatches in any order."""
    stuck = []
    for deadlock in found.deadlocks:
        by_microbatch: dict[int, list[str]] = {}
        for kind, microbatch, virtual_stage in sorted(deadlock.trace):
            by_microbatch.setdefault(microbatch, []).append(f"{kind}@{virtual_stage}")
        stuck.append((sorted(by_microbatch.values()), deadlock.held))
    return found.peak_held, found.peak_received, found.peak_buffered, sorted(stuck)


def assert_same(grid: Grid) -> None:
    oracles: Oracles = {}
    cases = list(grid)
    assert cases
    for case in cases:
        reduced, whole = (case.explore(reduce=reduce, oracles=oracles) for reduce in (True, False))
        assert what_matters(reduced) == what_matters(whole), case


@pytest.mark.parametrize("rule", RULE_NAMES)
@pytest.mark.parametrize("backward", ["whole", long("split"), long("mixed")])
def test_every_rule_in_every_small_case(rule: str, backward: Backward) -> None:
    grid = Grid(
        stages=(1, 2, 3) if backward == "whole" else (1, 2),
        microbatches=(2,),
        backwards=(backward,),
        modes=(Mode.TRAIN,),
        rules=(rule,),
        in_order=(None, Kind.B, Kind.W),
        where=("all",),
    )
    assert_same(grid)


@pytest.mark.parametrize("rule", RULE_NAMES)
def test_every_rule_with_three_microbatches(rule: str) -> None:
    train = (Mode.TRAIN,)
    assert_same(Grid((1, 2), (3,), (2,), ("v",), ("whole",), train, (1, 2, 3), (rule,), (None, Kind.B), ("all",)))


def byte_limits() -> Iterator[tuple[Limit, Sequence[int] | None]]:
    for num_bytes in (1, 2, 3, 5):
        for sizes in (None, (1, 2, 3), (3, 1, 2)):
            yield Limit(bytes=num_bytes), sizes
            yield Limit(1, num_bytes), sizes


@pytest.mark.long
def test_byte_limits() -> None:
    graph = TaskGraph.chain(2, chunks=2, layout="v")
    for limit, sizes in byte_limits():
        for in_order in ((), [(Kind.B, 3)]):
            oracles: Oracles = {}
            reduced, whole = (
                explore(graph, 3, limit, in_order=in_order, sizes=sizes, reduce=reduce, oracles=oracles)
                for reduce in (True, False)
            )
            assert what_matters(reduced) == what_matters(whole)


@pytest.mark.parametrize("growth", [1, 3])
def test_backwards_that_grow(growth: int) -> None:
    """Only weight tasks stay possible until they are made."""
    for num_bytes in (2, 3, 5):
        graph = TaskGraph.chain(2, split=True)
        oracles: Oracles = {}
        reduced, whole = (
            explore(graph, 3, Limit(bytes=num_bytes), sizes=(1, 2, 3), growth=growth, reduce=reduce, oracles=oracles)
            for reduce in (True, False)
        )
        assert what_matters(reduced) == what_matters(whole)


def test_a_graph_of_two_sources_which_the_staircase_does_not_cover() -> None:
    """Two sources that feed one sink, K = 1: they may take different microbatches, and the sink waits for ever."""
    graph = TaskGraph(Placement(3), edges=((0, 2), (1, 2)))
    both = [explore(graph, 3, 1, admission=Staircase, reduce=reduce) for reduce in (True, False)]
    assert what_matters(both[0]) == what_matters(both[1])
    assert [str(task) for task in both[0].deadlocks[0].trace] == ["F0@0", "F1@1"]
    mended = explore(graph, 3, 1, in_order=[(Kind.B, 2)], admission=Reserve)
    assert not mended.deadlocks


@pytest.mark.parametrize("rule", GRAPH_RULES)
@pytest.mark.parametrize("table", [long((0, 0, 0)), long((0, 1, 0)), (0, 1, 2)])
def test_every_rule_on_every_graph_of_three_virtual_stages(rule: str, table: tuple[int, ...]) -> None:
    for number, edges in enumerate(graphs_of(3)):
        rng = random.Random(number)
        visits = random_visits(3, 2, rng) if rng.random() < 0.5 else None
        forced = everywhere(Kind.B, 3) if rng.random() < 0.3 else ()
        for slots in slots_of(table, 2, most_spare=1):
            case = GraphCase(table, edges, 2, slots, visits, rng.random() < 0.3, rule=rule, in_order=forced)
            reduced, whole = (case.explore(reduce=reduce) for reduce in (True, False))
            assert what_matters(reduced) == what_matters(whole), case


def test_it_visits_far_fewer_states() -> None:
    graph = TaskGraph.chain(2, chunks=2, split=True)
    states = [explore(graph, 3, 2, reduce=reduce).states for reduce in (True, False)]
    assert states[0] * 4 < states[1]
