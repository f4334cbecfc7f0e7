"""`order="natural"`: every kind on every virtual stage in microbatch order, whatever overtakes what."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import pytest
from batches import batches
from core_script import Script
from sim.adversaries import ADVERSARIES, random_limit
from sim.test_random_graphs import random_graph

from rrfp.core.events import Ordered, ReadyReported, StepOpened
from rrfp.core.group_step import GroupMembership
from rrfp.core.ready_set import natural_order
from rrfp.hints.registry import create_hint
from rrfp.lab.cluster.random_run import RandomRun
from rrfp.lab.explore.cases import random_visits
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import TablePlacement
from rrfp.model.tasks import Kind, Mode, Task

#: Runs of the long test, in one test, and in a quick one.
NUM_RUNS, BATCH, QUICK = 4_000, 100, 200

CHAIN = TaskGraph.chain(3)


def natural(graph: TaskGraph, stage: int, microbatches: int = 3, **options: object) -> Script:
    return Script(graph, stage, microbatches, in_order=tuple(natural_order(graph)), **options)  # type: ignore[arg-type]


def test_a_forward_whose_input_overtook_another_is_held_back() -> None:
    script = natural(CHAIN, 1)
    script.arrived("F2@0", "F1@0")
    assert script.ready == ""
    script.arrived("F0@0")
    assert script.ready == "F0@1"
    script.enqueued("F0@1")
    assert script.ready == "F1@1"


def test_so_is_a_backward() -> None:
    script = natural(CHAIN, 1)
    script.arrived("F0@0", "F1@0", "F2@0")
    script.ran("F0@1", "F1@1")
    script.arrived("B1@2")
    assert script.ready == "F2@1"
    script.arrived("B0@2")
    assert script.ready == "F2@1 B0@1"


def test_weight_tasks_run_in_order_too() -> None:
    script = natural(TaskGraph.chain(1, split=True), 0)
    script.ran("F0@0", "F1@0", "B0@0", "B1@0")
    assert script.ready == "F2@0 W0@0"
    script.ran("W0@0")
    assert script.ready == "F2@0 W1@0"


def test_kinds_and_chunks_stay_free() -> None:
    script = natural(TaskGraph.chain(1, chunks=2), 0)
    script.ran("F0@0", "F1@0", "F0@1")
    assert script.ready == "F1@1 F2@0 B0@1"


def test_a_microbatch_that_skips_a_part_is_not_waited_for_there() -> None:
    graph = TaskGraph(TablePlacement((0, 1, 2)), ((0, 1), (1, 2), (0, 2)))
    script = natural(graph, 1, skipped=[{1}, {}, {1}])
    script.arrived("F1@0")
    assert script.ready == "F1@1"
    assert natural(graph, 2, skipped=[{1}, {}, {1}]).arrived("F2@0") == []


def test_forward_only_steps_keep_the_order() -> None:
    script = natural(CHAIN, 2, mode=Mode.FORWARD)
    script.arrived("F1@1")
    assert script.ready == ""
    script.arrived("F0@1")
    assert script.ready == "F0@2"


def test_sizes_order_nothing() -> None:
    script = Script(CHAIN, 0, 0, hint=create_hint("bfw-pyramid"), in_order=tuple(natural_order(CHAIN)))
    script.told(StepOpened(0, Mode.TRAIN, 3, (9.0, 1.0, 5.0)))
    assert script.ready == "F0@0"


def test_a_leader_orders_nothing_that_its_followers_hold_back() -> None:
    leader = natural(CHAIN, 1, group=GroupMembership(0, 2))
    leader.arrived("F1@0", "F0@0")
    leader.told(ReadyReported(leader.step, 1, Task.parse("F1@1")))
    assert leader.ready == ""
    leader.told(ReadyReported(leader.step, 1, Task.parse("F0@1")))
    assert leader.ready == "F0@1"
    leader.enqueued("F0@1")
    assert leader.ready == "F1@1"
    follower = natural(CHAIN, 1, group=GroupMembership(1, 2))
    follower.told(*(Ordered(follower.step, number, Task(Kind.F, number, 1)) for number in range(2)))
    follower.arrived("F1@0")
    assert follower.decisions(1) == "-"
    follower.arrived("F0@0")
    assert follower.decisions(2) == "F0@1 F1@1"


def is_natural(order: Iterable[Task]) -> bool:
    """Whether the microbatches of every kind and virtual stage rise."""
    last: dict[tuple[Kind, int], int] = {}
    for kind, microbatch, virtual_stage in order:
        if microbatch <= last.get((kind, virtual_stage), -1):
            return False
        last[kind, virtual_stage] = microbatch
    return True


def random_orders(seed: int, *, forced: bool) -> list[Sequence[Task]]:
    """The orders of all ranks of the seed's pipeline, where messages overtake and the hint does what it likes."""
    rng = random.Random(seed)
    graph = random_graph(rng)
    if rng.random() < 0.5:
        layout = rng.choice(["looped", "v"])
        graph = TaskGraph.chain(rng.randint(1, 4), chunks=rng.randint(1, 3), layout=layout, split=rng.random() < 0.5)  # type: ignore[arg-type]
    stages, count = graph.placement.stages, graph.placement.num_virtual_stages
    microbatches, members, adversary = rng.randint(1, 6), rng.choice([1, 1, 2]), rng.choice(ADVERSARIES)
    run = RandomRun(
        graph,
        [adversary(rng) for _ in range(stages)],
        [random_limit(rng, microbatches) for _ in range(stages)],
        seed=seed,
        depth=rng.choice([1, 1, 2]),
        in_order=natural_order(graph) if forced else (),
        delivery="any",
        members=members,
        takes_offers=members == 1 and rng.random() < 0.5,
        visits=[random_visits(count, microbatches, rng, rng.choice([0.0, 0.4]))],
    )
    run.run([(rng.choice([Mode.TRAIN, Mode.TRAIN, Mode.FORWARD]), microbatches)])
    return [order for stage in range(stages) for member in range(members) for order in run.order_of(stage, member)]


@pytest.mark.parametrize("first", batches(NUM_RUNS, BATCH, QUICK))
def test_whatever_hints_and_networks_do_every_run_ends_in_natural_order(first: int) -> None:
    for seed in range(first, first + BATCH):
        assert all(map(is_natural, random_orders(seed, forced=True))), seed


def test_without_it_the_same_hints_and_networks_leave_that_order() -> None:
    assert not all(is_natural(order) for seed in range(20) for order in random_orders(seed, forced=False))
