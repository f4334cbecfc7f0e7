"""The explorer itself: what it counts, what it reports, and that a state says all that a stage's core depends on."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from rrfp.core import events as ev
from rrfp.core.ready_set import ForcedOrder
from rrfp.core.stage_core import StageCore
from rrfp.hints.priorities import BackwardForward
from rrfp.lab.explore.cases import random_visits
from rrfp.lab.explore.search import Deadlock, Exploration, Oracles, StageProblem, _Explorer, explore
from rrfp.memory.admission import Limit
from rrfp.memory.rules import Staircase
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import Placement, TablePlacement
from rrfp.model.tasks import Kind, Mode, StepId, Task
from rrfp.model.visits import Visits

SKIPPING = TaskGraph(Placement(3), edges=((0, 1), (1, 2), (0, 2)))


@pytest.mark.parametrize(
    ("graph", "microbatches", "states"),
    [
        (TaskGraph.chain(1), 1, 3),  # nothing, F, B
        (TaskGraph.chain(1), 2, 6),  # multisets of two of those
        (TaskGraph.chain(1, split=True), 2, 10),
        (TaskGraph.chain(2), 1, 5),
        (TaskGraph.chain(2), 3, 35),  # multisets of three of five
        (TaskGraph.chain(4, split=True), 3, 7_770),  # multisets of three of thirty-five
    ],
)
def test_without_limits_every_combination_of_progress_is_reached(
    graph: TaskGraph, microbatches: int, states: int
) -> None:
    assert explore(graph, microbatches, reduce=False).states == states


def test_a_forced_order_keeps_microbatches_apart() -> None:
    """One stage, two microbatches, B in order: of the nine pairs of {nothing, F, B}, two have B1 without B0."""
    assert explore(TaskGraph.chain(1), 2, in_order=[(Kind.B, 0)], reduce=False).states == 7


def test_the_papers_rule_keeps_microbatches_apart() -> None:
    """One stage, two chunks, K = 1: a full stage serves microbatch 0 first, so that 1 is not its mirror image."""
    graph = TaskGraph.chain(1, chunks=2)
    mirrored = explore(graph, 2, Limit(2), reduce=False)
    apart = explore(graph, 2, Limit(2, rule="paper"), reduce=False)
    assert (mirrored.states, apart.states) == (15, 25)  # multisets, and pairs, of five


def test_uneven_sizes_keep_microbatches_apart() -> None:
    explored = [explore(TaskGraph.chain(1), 2, sizes=sizes, reduce=False).states for sizes in (None, (4, 4), (4, 5))]
    assert explored == [6, 6, 9]


def test_peak_held_is_what_the_limit_or_the_step_allows() -> None:
    assert explore(TaskGraph.chain(3), 4, "1f1b").peak_held == (3, 2, 1)


def test_limits_may_differ_by_stage() -> None:
    assert explore(TaskGraph.chain(3), 4, [Limit(2), None, 3]).peak_held == (2, 2, 2)


def test_received_inputs_wait_for_their_task_and_buffered_ones_for_its_backward() -> None:
    """N = 2, M = 3, no limit: three forwards come to stage 1 unused, and are kept; three gradients come to stage 0."""
    found = explore(TaskGraph.chain(2), 3)
    assert (found.peak_received, found.peak_buffered) == ((3, 3), (0, 3))
    forward = explore(TaskGraph.chain(2), 3, 2, Mode.FORWARD)
    assert (forward.peak_received, forward.peak_buffered) == ((0, 2), (0, 2))


def test_skip_edges_are_followed() -> None:
    for mode in Mode:
        found = explore(SKIPPING, 3, 1, mode)
        assert (found.deadlocks, found.peak_held) == ((), (1, 1, 1))


def test_a_deadlock_tells_its_trace_and_what_each_stage_waits_for() -> None:
    found = explore(TaskGraph.chain(2), 2, 1, in_order=[(Kind.B, 0), (Kind.B, 1)], admission=Staircase, reduce=False)
    f1_0, f1_1 = Task(Kind.F, 1, 0), Task(Kind.F, 1, 1)
    waits = ("F0@0 (blocked by the memory limit)", "F0@1 (F0@0 owed by stage 0)")
    stuck = Deadlock(trace=(f1_0, f1_1), held=(1, 1), waits=waits)
    assert found == Exploration(11, 10, (stuck,), peak_held=(1, 1), peak_received=(1, 1), peak_buffered=(0, 1))
    assert str(found) == (
        "11 states, 10 transitions, 1 deadlocks; largest D by stage: 1 1\n"
        "deadlock after F1@0 F1@1\n"
        "  stage 0 holds 1, waits for: F0@0 (blocked by the memory limit)\n"
        "  stage 1 holds 1, waits for: F0@1 (F0@0 owed by stage 0)"
    )


def test_every_deadlock_is_found_however_loose_the_limit_below_m() -> None:
    graph, order = TaskGraph.chain(3), [(Kind.B, v) for v in range(3)]
    found = [explore(graph, 3, limit, in_order=order, admission=Staircase) for limit in (1, 2, 3)]
    assert [len(one.deadlocks) for one in found] == [3, 1, 0]


def test_deadlocks_come_nearest_first() -> None:
    found = explore(TaskGraph.chain(3), 3, "1f1b", in_order=[(Kind.B, v) for v in range(3)], admission=Staircase)
    lengths = [len(one.trace) for one in found.deadlocks]
    assert len(lengths) > 1
    assert lengths == sorted(lengths)


def test_stages_that_two_problems_have_in_common_are_asked_once() -> None:
    graph, oracles = TaskGraph.chain(2), Oracles()
    alone = explore(graph, 3, "1f1b")
    explore(graph, 3, 2, oracles=oracles)
    assert len(oracles) == 2
    assert explore(graph, 3, "1f1b", oracles=oracles) == alone
    assert len(oracles) == 3  # stage 0 had its answers for K = 2


LIVE: list[tuple[TaskGraph, Mode, str | int, str, tuple[ForcedOrder, ...]]] = [
    (TaskGraph.chain(3), Mode.TRAIN, "1f1b", "staircase", ()),
    (TaskGraph.chain(3, split=True), Mode.TRAIN, 2, "staircase", ()),
    (TaskGraph.chain(3), Mode.FORWARD, 1, "staircase", ()),
    (TaskGraph.chain(2, chunks=2, layout="v", split=True), Mode.TRAIN, 1, "staircase", ()),
    (TaskGraph.chain(2, chunks=2), Mode.TRAIN, 2, "staircase", ((Kind.B, 0), (Kind.B, 3))),
    (SKIPPING, Mode.FORWARD, 2, "staircase", ()),
    (TaskGraph.chain(2, chunks=2, split=True), Mode.TRAIN, 1, "paper", ()),
    (TaskGraph.chain(3, chunks=2, layout="v"), Mode.TRAIN, 2, "paper", ((Kind.B, 1),)),
    (TaskGraph.chain(3, chunks=2, layout="v"), Mode.FORWARD, 1, "paper", ()),
]


@pytest.mark.parametrize(("graph", "mode", "limit", "rule", "in_order"), LIVE)
def test_what_is_ready_depends_on_what_ran_and_not_on_the_order(
    graph: TaskGraph, mode: Mode, limit: str | int, rule: str, in_order: tuple[ForcedOrder, ...]
) -> None:
    """The explorer's one assumption: cores that live through a random run say what a freshly told core says."""
    stages, step = graph.placement.stages, StepId(0, mode, 4)
    limits = tuple(Limit(Limit.resolve(limit, stage, stages).microbatches, rule=rule) for stage in range(stages))
    problems = [
        StageProblem(graph, step, Visits(4), stage, limit, frozenset(in_order), None, (1,) * 4)
        for stage, limit in enumerate(limits)
    ]
    explorer = _Explorer(problems, {})
    for seed in range(20):
        cores = [StageCore(graph, i, BackwardForward(), limit, in_order=in_order) for i, limit in enumerate(limits)]
        received = [0] * stages
        for ran in live_run(cores, step, random.Random(seed)):
            state = tuple(sum(explorer.bits[task.kind, task.virtual_stage] for task in of_one) for of_one in ran)
            for stage, (core, oracle) in enumerate(zip(cores, explorer.oracles, strict=True)):
                answer = oracle.answer(state)
                ready = {(task.microbatch, explorer.bits[task.kind, task.virtual_stage]) for task in core.ready}
                assert (set(answer.moves), answer.held) == (ready, core.view.held)
                received[stage] = max(received[stage], answer.received)
        assert received == [core.peaks.received for core in cores]


@pytest.mark.parametrize("mode", Mode)
def test_the_same_on_graphs_with_branches_whose_parts_are_skipped(mode: Mode) -> None:
    """Two encoders and a sink, one encoder beside the sink's second half; staircase and banker, any skips."""
    graph = TaskGraph(TablePlacement((0, 1, 1, 2)), ((0, 2), (1, 2), (2, 3), (0, 3)), (False, True, False, True))
    step, limits = StepId(0, mode, 3), [Limit(1), Limit(2), Limit(1)]
    for seed in range(20):
        rng = random.Random(seed)
        visits = random_visits(4, 3, rng)
        problems = [
            StageProblem(graph, step, visits, stage, limit, frozenset(), None, (1,) * 3)
            for stage, limit in enumerate(limits)
        ]
        explorer = _Explorer(problems, {})
        cores = [StageCore(graph, stage, BackwardForward(), limit) for stage, limit in enumerate(limits)]
        for ran in live_run(cores, step, rng, visits):
            state = tuple(sum(explorer.bits[task.kind, task.virtual_stage] for task in of_one) for of_one in ran)
            for core, oracle in zip(cores, explorer.oracles, strict=True):
                answer = oracle.answer(state)
                ready = {(task.microbatch, explorer.bits[task.kind, task.virtual_stage]) for task in core.ready}
                assert (set(answer.moves), answer.held, answer.received) == (
                    ready,
                    core.view.held,
                    core.holding.received,
                )


def live_run(
    cores: list[StageCore], step: StepId, rng: random.Random, visits: Visits | None = None
) -> Iterator[list[list[Task]]]:
    """Let random stages run random ready tasks, at once and with instant delivery; what has run, by microbatch."""
    ran: list[list[Task]] = [[] for _ in range(step.microbatches)]
    for core in cores:
        core.apply(ev.StepOpened(step.number, step.mode, step.microbatches, visits=visits))
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
    tasks = (task for core in cores for task in core.graph.tasks(core.stage, step.microbatches, step.mode))
    assert sum(map(len, ran)) == sum(map((visits or Visits(step.microbatches)).exists, tasks))
