"""Every reachable state of small pipelines: no deadlock, D within its limit; and the known deadlocks are found."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from rrfp.core import events as ev
from rrfp.core.admission import Limit
from rrfp.core.graph import Graph
from rrfp.core.readiness import ForcedOrder
from rrfp.core.stage_core import StageCore
from rrfp.core.tasks import Kind, Mode, StepId, Task
from rrfp.core.topology import Layout, Placement
from rrfp.hints.alternating import BackwardForward
from rrfp.sim.explore import Deadlock, Exploration, _Explorer, explore

ALL_LIMITS = ("1", "2", "3", "4", "1f1b")


def limits_up_to(microbatches: int) -> list[str]:
    return [limit for limit in ALL_LIMITS if limit == "1f1b" or int(limit) <= microbatches]


def assert_safe(found: Exploration, graph: Graph, limit: str | int) -> None:
    """No deadlock, and D at most K * C on every stage."""
    stages, chunks = graph.placement.stages, graph.placement.chunks
    slots = [(stages - stage if limit == "1f1b" else int(limit)) * chunks for stage in range(stages)]
    assert not found.deadlocks, found
    assert [held for held, most in zip(found.peak_held, slots, strict=True) if held > most] == []


@pytest.mark.parametrize("mode", ["train", "train, split", "forward"])
@pytest.mark.parametrize("microbatches", range(1, 5))
@pytest.mark.parametrize("stages", range(1, 5))
def test_one_chunk_a_stage_never_deadlocks_at_any_limit(stages: int, microbatches: int, mode: str) -> None:
    graph = Graph.chain(stages, split=mode.endswith("split"))
    for limit in limits_up_to(microbatches):
        found = explore(graph, microbatches, limit, Mode.FORWARD if mode == "forward" else Mode.TRAIN)
        assert_safe(found, graph, limit)


@pytest.mark.parametrize("layout", ["looped", "v"])
@pytest.mark.parametrize(
    ("stages", "microbatches", "split"), [(2, 3, False), (3, 3, False), (1, 4, True), (2, 2, True)]
)
def test_two_chunks_a_stage_never_deadlock_under_the_staircase(
    stages: int, microbatches: int, split: bool, layout: Layout
) -> None:
    graph = Graph.chain(stages, chunks=2, layout=layout, split=split)
    for limit in limits_up_to(microbatches):
        for mode in Mode:
            assert_safe(explore(graph, microbatches, limit, mode), graph, limit)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["looped", "v"])
@pytest.mark.parametrize(("stages", "microbatches", "split"), [(4, 4, False), (2, 4, True), (3, 2, True)])
def test_two_chunks_a_stage_never_deadlock_in_larger_cases(
    stages: int, microbatches: int, split: bool, layout: Layout
) -> None:
    graph = Graph.chain(stages, chunks=2, layout=layout, split=split)
    for limit in limits_up_to(microbatches):
        assert_safe(explore(graph, microbatches, limit), graph, limit)


def forced_orders(graph: Graph) -> Iterator[list[ForcedOrder]]:
    """Each kind in order everywhere, on the last virtual stage alone, and on one in the middle."""
    count = graph.placement.num_virtual_stages
    for kind in graph.kinds(0, Mode.TRAIN):
        for where in (range(count), [count - 1], [(count - 1) // 2]):
            yield [(kind, v) for v in where]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("microbatches", [1, 2, 3])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_forced_order_never_deadlocks_with_the_reserve_rule(stages: int, microbatches: int, split: bool) -> None:
    graph = Graph.chain(stages, split=split)
    for in_order in forced_orders(graph):
        for limit in limits_up_to(microbatches):
            assert_safe(explore(graph, microbatches, limit, in_order=in_order), graph, limit)


@pytest.mark.parametrize("layout", ["looped", "v"])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 2)])
def test_a_forced_order_never_deadlocks_with_two_chunks(
    stages: int, microbatches: int, split: bool, layout: Layout
) -> None:
    """One reserved slot is not enough here: it deadlocks at C = 2, K = 2, M = 3."""
    graph = Graph.chain(stages, chunks=2, layout=layout, split=split)
    for in_order in forced_orders(graph):
        for limit in limits_up_to(microbatches):
            assert_safe(explore(graph, microbatches, limit, in_order=in_order), graph, limit)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["looped", "v"])
@pytest.mark.parametrize(("stages", "split"), [(3, False), (2, True)])
def test_a_forced_order_never_deadlocks_with_two_chunks_in_larger_cases(
    stages: int, split: bool, layout: Layout
) -> None:
    graph = Graph.chain(stages, chunks=2, layout=layout, split=split)
    for in_order in forced_orders(graph):
        for limit in limits_up_to(3):
            assert_safe(explore(graph, 3, limit, in_order=in_order), graph, limit)


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("forced", [False, True])
def test_a_byte_limit_never_deadlocks(forced: bool, chunks: int) -> None:
    graph = Graph.chain(2, chunks=chunks)
    for in_order in forced_orders(graph) if forced else [()]:
        for num_bytes in range(1, 5):
            found = explore(graph, 3, Limit(num_bytes=num_bytes), in_order=in_order)
            assert not found.deadlocks, found


def test_without_the_reserve_rule_a_forced_backward_order_deadlocks() -> None:
    """Later microbatches fill the memory while the lowest one's forward waits outside."""
    graph = Graph.chain(2)
    found = explore(graph, 2, 1, in_order=[(Kind.B, 0), (Kind.B, 1)], reserve=False)
    f1_0, f1_1 = Task(Kind.F, 1, 0), Task(Kind.F, 1, 1)
    f0_0, f0_1 = Task(Kind.F, 0, 0), Task(Kind.F, 0, 1)
    stuck = Deadlock(trace=(f1_0, f1_1), held=(1, 1), waiting=((f0_0, ()), (f0_1, (f0_0,))))
    assert found == Exploration(states=11, transitions=10, deadlocks=(stuck,), peak_held=(1, 1))


def test_every_deadlock_is_found_however_loose_the_limit_below_m() -> None:
    graph, order = Graph.chain(3), [(Kind.B, v) for v in range(3)]
    deadlocks = [len(explore(graph, 3, limit, in_order=order, reserve=False).deadlocks) for limit in (1, 2, 3)]
    assert deadlocks == [3, 1, 0]


def test_a_deadlock_prints_its_trace_and_what_each_stage_waits_for() -> None:
    found = explore(Graph.chain(2), 2, 1, in_order=[(Kind.B, 0), (Kind.B, 1)], reserve=False)
    assert str(found) == (
        "11 states, 10 transitions, 1 deadlocks; largest D by stage: 1 1\n"
        "deadlock after F1@0 F1@1\n"
        "  stage 0 holds 1: F0@0 waits for memory\n"
        "  stage 1 holds 1: F0@1 waits for F0@0"
    )


@pytest.mark.parametrize(
    ("graph", "microbatches", "states"),
    [
        (Graph.chain(1), 1, 3),  # nothing, F, B
        (Graph.chain(1), 2, 6),  # multisets of two of those
        (Graph.chain(1, split=True), 2, 10),
        (Graph.chain(2), 1, 5),
        (Graph.chain(2), 3, 35),  # multisets of three of five
        (Graph.chain(4, split=True), 4, 73_815),  # multisets of four of thirty-five
    ],
)
def test_without_limits_every_combination_of_progress_is_reached(graph: Graph, microbatches: int, states: int) -> None:
    assert explore(graph, microbatches).states == states


def test_a_forced_order_keeps_microbatches_apart() -> None:
    """One stage, two microbatches, B in order: of the nine pairs of {nothing, F, B}, two have B1 without B0."""
    assert explore(Graph.chain(1), 2, in_order=[(Kind.B, 0)]).states == 7


def test_peak_held_is_what_the_limit_or_the_step_allows() -> None:
    assert explore(Graph.chain(3), 4, "1f1b").peak_held == (3, 2, 1)


def test_limits_may_differ_by_stage() -> None:
    assert explore(Graph.chain(3), 4, [Limit(2), None, 3]).peak_held == (2, 2, 2)


def test_skip_edges_are_followed() -> None:
    graph = Graph(Placement(3), edges=((0, 1), (1, 2), (0, 2)))
    for mode in Mode:
        assert_safe(explore(graph, 3, 1, mode), graph, 1)


CASES = [
    (Graph.chain(3), Mode.TRAIN, "1f1b", ()),
    (Graph.chain(3, split=True), Mode.TRAIN, 2, ()),
    (Graph.chain(3), Mode.FORWARD, 1, ()),
    (Graph.chain(2, chunks=2, layout="v", split=True), Mode.TRAIN, 1, ()),
    (Graph.chain(2, chunks=2), Mode.TRAIN, 2, ((Kind.B, 0), (Kind.B, 3))),
    (Graph(Placement(3), edges=((0, 1), (1, 2), (0, 2))), Mode.FORWARD, 2, ()),
]


@pytest.mark.parametrize(("graph", "mode", "limit", "in_order"), CASES)
def test_what_is_ready_depends_on_what_ran_and_not_on_the_order(
    graph: Graph, mode: Mode, limit: str | int, in_order: tuple[ForcedOrder, ...]
) -> None:
    """The explorer's one assumption: cores that live through a random run say what a freshly told core says."""
    stages = graph.placement.stages
    limits = [Limit.resolve(limit, stage, stages) for stage in range(stages)]
    explorer = _Explorer(graph, 4, limits, mode, frozenset(in_order), True)
    for seed in range(20):
        cores = [StageCore(graph, i, BackwardForward(), limit, in_order=in_order) for i, limit in enumerate(limits)]
        for ran in live_run(cores, StepId(0, mode, 4), random.Random(seed)):
            state = tuple(sum(explorer._bits[task.kind, task.virtual_stage] for task in of_one) for of_one in ran)
            told = [explorer._core(stage, state) for stage in range(stages)]
            assert [(list(c.ready), c.view.held) for c in told] == [(list(c.ready), c.view.held) for c in cores]


def live_run(cores: list[StageCore], step: StepId, rng: random.Random) -> Iterator[list[list[Task]]]:
    """Let random stages run random ready tasks, at once and with instant delivery; what has run, by microbatch."""
    ran: list[list[Task]] = [[] for _ in range(step.microbatches)]
    for core in cores:
        core.apply(ev.StepOpened(step.number, step.mode, step.microbatches))
    while choices := [(core, task) for core in cores for task in core.ready]:
        core, task = rng.choice(choices)
        core.apply(ev.Enqueued(task))
        for instruction in core.apply(ev.Completed(task, held=1)):
            if isinstance(instruction, ev.Send):
                cores[instruction.peer].apply(ev.Arrived(step, task))
            elif isinstance(instruction, ev.Credit):
                cores[instruction.peer].apply(ev.Consumed(step, core.stage, instruction.task))
        ran[task.microbatch].append(task)
        yield ran
    assert sum(map(len, ran)) == sum(
        1 for core in cores for _ in core.graph.tasks(core.stage, step.microbatches, step.mode)
    )
