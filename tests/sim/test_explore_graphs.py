"""Pipelines that are no chains: the rule that ships has no deadlock, and the staircase has where branches join."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import pytest
from batches import batches, long
from sim.graph_cases import GraphCase, everywhere, graphs_of, slots_of, tables_of

from rrfp.lab.explore.cases import InOrder, explored, random_visits
from rrfp.lab.explore.search import explore
from rrfp.memory.admission import Limit
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import TablePlacement
from rrfp.model.tasks import Kind, Mode
from rrfp.model.visits import Visits

Edges = tuple[tuple[int, int], ...]

TWO_SOURCES: Edges = ((0, 2), (1, 2))
DIAMOND: Edges = ((0, 1), (0, 2), (1, 3), (2, 3))
CHAIN_AND_SKIP: Edges = ((0, 1), (0, 3), (1, 2), (2, 3))

#: Where the staircase, or with a forced order the reserve rule, deadlocks, and after what.
WRONG: list[tuple[GraphCase, str]] = [
    (GraphCase((0, 0, 0), TWO_SOURCES, 1, (3,)), "F0@1"),
    (GraphCase((0, 1, 2), TWO_SOURCES, 2, (1, 1, 1)), "F0@0 F1@1"),
    (GraphCase((0, 1, 2, 3), DIAMOND, 2, (2, 1, 1, 1)), "F0@0 F1@0 F0@1 F1@2"),
    (GraphCase((0, 0, 0), TWO_SOURCES, 1, (3,), in_order=everywhere(Kind.B, 3)), "F0@1"),
    (GraphCase((0, 0, 0), TWO_SOURCES, 2, (3,), in_order=everywhere(Kind.B, 3)), "F0@1 F1@1"),
    (GraphCase((0, 0, 0, 0), CHAIN_AND_SKIP, 1, (4,), Visits(1, (frozenset({1}),))), "F0@2"),
]


def with_rule(case: GraphCase, rule: str) -> GraphCase:
    return GraphCase(
        case.table,
        case.edges,
        case.microbatches,
        case.slots,
        case.visits,
        case.is_split,
        case.mode,
        rule,
        case.in_order,
    )


@pytest.mark.parametrize(("case", "trace"), WRONG, ids=str)
def test_the_staircase_and_the_reserve_rule_deadlock_where_branches_join(case: GraphCase, trace: str) -> None:
    found = with_rule(case, "staircase").explore()
    assert " ".join(map(str, found.deadlocks[0].trace)) == trace


@pytest.mark.parametrize("rule", ["hybrid", "banker"])
def test_the_banker_does_not_deadlock_there(rule: str) -> None:
    assert_safe(with_rule(case, rule) for case, _ in WRONG)


def test_without_a_join_or_with_the_whole_chain_the_staircase_is_clear() -> None:
    assert_safe(
        GraphCase(table, edges, 2, slots, rule="staircase")
        for edges in (((0, 1), (0, 2), (0, 3)), CHAIN_AND_SKIP)
        for table in tables_of(4)
        for slots in slots_of(table, 2, most_spare=0)
    )


@pytest.mark.parametrize("rule", ["hybrid", "banker"])
def test_all_slots_are_used(rule: str) -> None:
    for slots in slots_of((0, 0, 0), 2):
        case = GraphCase((0, 0, 0), TWO_SOURCES, 2, slots, rule=rule)
        assert case.explore().peak_held == slots


@pytest.mark.parametrize("table", [(0, 1, 0), long((0, 1, 2)), long((0, 0, 1)), long((0, 1, 1)), long((0, 0, 0))])
def test_bytes_where_split_backwards_let_weight_tasks_go_first(table: tuple[int, ...]) -> None:
    for edges in graphs_of(3):
        graph = TaskGraph(TablePlacement(table), edges, (True,) * 3)
        for num_bytes in (1, 3, 4, 6):
            found = explore(graph, 2, Limit(bytes=num_bytes), sizes=(1, 2), growth=2)
            assert not found.deadlocks, (edges, num_bytes, found)


#: What was explored, for docs/memory-rules.md: `pytest --log-cli-level=INFO` shows it.
LOG = logging.getLogger(__name__)
#: Random cases of one test.
BATCH = 10
#: The graphs of four virtual stages are divided among so many tests; where backwards are split each takes minutes.
PARTS = 16


@dataclass(frozen=True, slots=True)
class Options:
    """What a step of a graph is like, apart from its graph, placement and limits."""

    is_split: bool = False
    mode: Mode = Mode.TRAIN
    forced: InOrder | None = None
    skips: bool = False

    def __str__(self) -> str:
        words = ["forward" if self.mode is Mode.FORWARD else "split" if self.is_split else "whole"]
        return "-".join([*words, *([f"{self.forced}-in-order"] if self.forced else []), *(["skips"] * self.skips)])


WHOLE, SPLIT, FORWARD = Options(), Options(is_split=True), Options(mode=Mode.FORWARD)
SKIPS = [
    Options(is_split, mode, skips=True)
    for is_split, mode in ((False, Mode.TRAIN), (True, Mode.TRAIN), (False, Mode.FORWARD))
]
FORCED = [
    Options(forced=Kind.B),
    Options(forced=Kind.F),
    Options(is_split=True, forced=Kind.W),
    Options(mode=Mode.FORWARD, forced=Kind.F),
    Options(forced=Kind.B, skips=True),
    Options(forced="natural"),
    Options(mode=Mode.FORWARD, forced="natural"),
    Options(is_split=True, forced="natural", skips=True),
]
ALL = [WHOLE, SPLIT, FORWARD, *SKIPS, *FORCED]


def forced_on(where: Iterable[int], options: Options) -> tuple[tuple[Kind, int], ...]:
    kinds: Sequence[Kind]
    if options.forced == "natural":
        kinds = [Kind.F] if options.mode is Mode.FORWARD else [Kind.F, Kind.B, *[Kind.W] * options.is_split]
    else:
        kinds = [] if options.forced is None else [options.forced]
    return tuple((kind, v) for kind in kinds for v in where)


def case_of(
    edges: Edges, table: tuple[int, ...], microbatches: int, rule: str, options: Options
) -> Iterator[GraphCase]:
    """The graph on its placement at every limit; what is skipped is drawn by a seed of its own."""
    count, seed = len(table), f"{edges} {table}"
    visits = random_visits(count, microbatches, random.Random(seed)) if options.skips else None
    forced = forced_on(range(count), options)
    # A limit K is K slots for each chunk at least, visited or not; the banker needs no more than what is visited.
    for slots in slots_of(table, microbatches, visits if rule == "banker" else None):
        yield GraphCase(table, edges, microbatches, slots, visits, options.is_split, options.mode, rule, forced)


def every_case(count: int, microbatches: int, rule: str, options: Options) -> Iterator[GraphCase]:
    for edges in graphs_of(count):
        for table in tables_of(count):
            yield from case_of(edges, table, microbatches, rule, options)


def assert_safe(cases: Iterable[GraphCase]) -> None:
    done = states = 0
    for one in explored(cases):
        assert one.is_safe, f"{one.case}: {one.broken}\n{one.exploration}"
        done, states = done + 1, states + one.exploration.states
    assert done
    LOG.info("%d cases, %d states", done, states)


@pytest.mark.parametrize("options", [WHOLE, SPLIT, FORWARD], ids=str)
def test_a_chain_whose_stages_have_unequally_many_chunks(options: Options) -> None:
    """Torch's own example: the first rank has both ends."""
    chain = tuple((v, v + 1) for v in range(4))
    assert_safe(case_of(chain, (0, 0, 1, 1, 0), 2, "hybrid", options))


@pytest.mark.parametrize("options", [WHOLE, FORWARD, *(long(options) for options in (SPLIT, *SKIPS, *FORCED))], ids=str)
@pytest.mark.parametrize("rule", ["hybrid", long("banker")])
def test_all_graphs_of_three_virtual_stages_with_two_microbatches(rule: str, options: Options) -> None:
    for count in (1, 2, 3):
        assert_safe(every_case(count, 2, rule, options))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("options", ALL, ids=str)
def test_all_graphs_of_three_virtual_stages_with_three_microbatches(options: Options) -> None:
    for count in (1, 2, 3):
        assert_safe(every_case(count, 3, "hybrid", options))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("options", ALL, ids=str)
def test_all_graphs_of_four_virtual_stages_with_two_microbatches(options: Options, part: int) -> None:
    graphs = list(graphs_of(4))[part::PARTS]
    assert_safe(
        case for edges in graphs for table in tables_of(4) for case in case_of(edges, table, 2, "hybrid", options)
    )


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("options", [WHOLE, FORWARD, *SKIPS], ids=str)
def test_the_banker_on_every_stage_of_larger_graphs(options: Options, part: int) -> None:
    """With a forced order that is what ships anyway, unless the graph is a chain."""
    graphs = [(count, microbatches, edges) for count, microbatches in ((3, 3), (4, 2)) for edges in graphs_of(count)]
    assert_safe(
        case
        for count, microbatches, edges in graphs[part::PARTS]
        for table in tables_of(count)
        for case in case_of(edges, table, microbatches, "banker", options)
    )


def random_case(seed: int, count: int, microbatches: int) -> GraphCase:
    """Any graph on any placement, at one of its lower limits, with or without skips, any order."""
    rng = random.Random(seed)
    edges = tuple((u, v) for v in range(count) for u in range(v) if rng.random() < 0.5)
    table = rng.choice(list(tables_of(count)))
    options = rng.choice(ALL)
    rule = rng.choice(["hybrid", "hybrid", "banker"])
    visits = random_visits(count, microbatches, rng) if options.skips else None
    slots = rng.choice(list(slots_of(table, microbatches, visits if rule == "banker" else None, most_spare=2)))
    forced: tuple[tuple[Kind, int], ...] = ()
    if options.forced:
        where = [v for v in range(count) if rng.random() < 0.5] or [rng.randrange(count)]
        forced = forced_on(range(count) if options.forced == "natural" else where, options)
    return GraphCase(table, edges, microbatches, slots, visits, options.is_split, options.mode, rule, forced)


@pytest.mark.parametrize("first", batches(200, BATCH, BATCH))
def test_random_graphs_of_three_virtual_stages_with_three_microbatches(first: int) -> None:
    assert_safe(random_case(seed, 3, 3) for seed in range(first, first + BATCH))


@pytest.mark.parametrize("first", batches(200, BATCH, BATCH))
def test_random_graphs_of_four_virtual_stages_with_two_microbatches(first: int) -> None:
    assert_safe(random_case(seed, 4, 2) for seed in range(first, first + BATCH))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(0, 400, BATCH))
def test_random_graphs_of_four_virtual_stages_with_three_microbatches(first: int) -> None:
    assert_safe(random_case(seed, 4, 3) for seed in range(first, first + BATCH))
