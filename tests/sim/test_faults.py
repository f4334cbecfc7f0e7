"""Thousands of seeded runs of small pipelines with faults: each ends well, or with one error that names its cause.

A failure prints the one command that replays it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from batches import batches

from rrfp.costs import CostTable
from rrfp.engine.engine import run
from rrfp.lab.faults.cluster import FaultCluster
from rrfp.lab.faults.scenario import Scenario
from rrfp.model.placement import Placement
from rrfp.model.tasks import Kind, Mode, Task
from rrfp.testing.faults import REQUIRED, Ending, make_scenario, run_campaign, run_seed

QUICK, NUM_RUNS, NUM_MORE = 250, 6_000, 60_000
BATCH = 250


#: Endings that need three members, a round that failed, and a third member with something new to propose before the
#: outcome is there: `tests/arbiter/test_agreement.py` has what is refused then.
#: Lost bytes stall where a later chunk's forward waits for them: `tests/sim/test_faults_groups.py`.
#: A late offer is overtaken by no grant where no other copy claims the forward.
RARE = {
    **{f"{how} outcome": {Ending.REFUSED} for how in ("lose", "swap", "delay")},
    "lose bytes": {Ending.STALLED},
    **{f"{how} offer": {Ending.FINISHED} for how in ("swap", "delay")},
}


@pytest.mark.long
@pytest.mark.parametrize("first", range(NUM_RUNS, NUM_MORE, BATCH))
def test_every_one_of_many_more_runs_ends_well_or_names_its_fault(first: int) -> None:
    _expect_none(run_campaign(range(first, first + BATCH)).failed)


def _expect_none(failed: list[tuple[int, str]]) -> None:
    if failed:
        seed, problem = failed[0]
        pytest.fail(f"{len(failed)} runs failed: {problem}; rrfp check faults --seed {seed}", pytrace=False)


@pytest.mark.parametrize("first", batches(NUM_RUNS, BATCH, QUICK))
def test_every_run_ends_well_or_names_its_fault(first: int) -> None:
    _expect_none(run_campaign(range(first, first + BATCH)).failed)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_fault_is_met_alone_with_every_ending_that_it_may_have_and_with_no_other() -> None:
    seen = run_campaign(range(NUM_RUNS)).endings
    expected = {kind: set(endings) - RARE.get(kind, set()) for kind, endings in REQUIRED.items()}
    assert {kind: set(seen[kind]) - RARE.get(kind, set()) for kind in REQUIRED} == expected
    assert seen["none"].keys() == {Ending.FINISHED}
    assert Ending.UNFIT not in seen["several"]


def test_a_seed_makes_the_same_run_again_event_by_event() -> None:
    for seed in range(50):
        first: list[str] = []
        second: list[str] = []
        one, two = run_seed(seed, trace=first.append), run_seed(seed, trace=second.append)
        assert (first, one.scenario.describe(), one.text) == (second, two.scenario.describe(), two.text)
        assert first


def test_the_scenarios_have_everything_that_they_should() -> None:
    made = [make_scenario(seed) for seed in range(600)]
    chains = [one for one in made if one.graph.is_chain]
    graphs = [one for one in made if not one.graph.is_chain]
    assert 60 < len(graphs) < 160
    assert any(one.visits is not None for one in graphs)
    assert any(len(one.steps) > 1 for one in graphs)
    assert all(one.parallelism.members == one.parallelism.replicas == 1 for one in graphs)
    assert all(one.shared is None for one in graphs)
    places = [one.graph.placement for one in chains if isinstance(one.graph.placement, Placement)]
    assert {place.stages for place in places} == {1, 2, 3, 4, 5}
    assert {(place.chunks, place.layout) for place in places} == {*product((1, 2, 3), ("looped", "v"))}
    assert {sum(one.graph.split) / len(one.graph.split) for one in made} >= {0.0, 0.5, 1.0}
    assert {len(one.steps) for one in made} == {1, 2, 3}
    assert max(step.microbatches for one in made for step in one.steps) == 8
    assert {step.mode for one in made for step in one.steps} == {*Mode}
    assert {"bf", "random", "strict 1f1b"} <= {one.method for one in made}
    assert {limit.rule for one in made for limit in one.limits} == {"staircase", "paper"}
    assert {one.depth for one in made} == {1, 2}
    assert {len(one.faults) for one in made} == {0, 1, 2, 3}
    assert any(one.in_order for one in made)
    drawn = [one.parallelism for one in made]
    assert {parallelism.members for parallelism in drawn} == {1, 2, 3}
    assert {one.parallelism.replicas for one in made if one.shared is None} == {1, 2}
    assert {one.parallelism.replicas for one in made if one.shared is not None} == {2, 3}
    assert {(parallelism.is_led, parallelism.agrees) for parallelism in drawn} == {
        (False, False),
        (True, False),
        (False, True),
    }
    assert {parallelism.coupled for parallelism in drawn if parallelism.is_led} == {True, False}
    assert any(limit.bytes for one in made if one.parallelism.is_led for limit in one.limits)


def as_table(scenario: Scenario) -> CostTable:
    """What the engine needs to know: on each edge the latencies of the task whose output travels there."""
    graph, rows = scenario.graph, {kind: np.array(rows) for kind, rows in scenario.durations.items()}
    microbatches = rows[Kind.F].shape[1]
    there, back = (np.array(scenario.latencies[kind]) for kind in (Kind.F, Kind.B))
    edges = graph.edges or ()
    return CostTable.of_graph(
        graph,
        microbatches,
        forward=rows[Kind.F],
        backward=rows[Kind.B],
        weight=rows[Kind.W] if all(graph.split) else None,
        latency_forward=np.array([there[u] for u, _ in edges]).reshape(-1, microbatches),
        latency_backward=np.array([back[v] for _, v in edges]).reshape(-1, microbatches),
        skipped=() if scenario.visits is None else scenario.visits.skipped,
    )


def without_faults(scenario: Scenario) -> Scenario:
    """One training step, each edge of one latency, so that the channels of the engine are FIFOs as well.

    Where several edges of a graph lead from stage to stage, they share one channel: there all take the same.
    """
    microbatches = len(scenario.durations[Kind.F][0])
    steps = (scenario.steps[0]._replace(mode=Mode.TRAIN, microbatches=microbatches),)
    latencies = {kind: tuple((row[0],) * microbatches for row in rows) for kind, rows in scenario.latencies.items()}
    if not scenario.graph.is_chain or len(scenario.graph.edges or ()) >= len(scenario.graph.split):
        latencies = {kind: (rows[0],) * len(rows) for kind, rows in latencies.items()}
    return replace(scenario, steps=steps, latencies=latencies, depth=1, release_after=0.0, faults=())


@pytest.mark.parametrize("first", batches(300, 100, 100))
def test_without_faults_every_task_starts_when_the_engine_starts_it(first: int) -> None:
    compared: Counter[bool] = Counter()
    for seed in range(first, first + 100):
        made = make_scenario(seed, alone=True)
        graph = made.graph
        if len(set(graph.split)) > 1:
            continue  # a cost table splits all or nothing
        scenario = without_faults(made)
        hints = [made.make_hint(stage) for stage in range(graph.placement.stages)]
        try:
            expected = run(
                as_table(scenario),
                hints,
                made.limits,
                sizes=made.sizes,
                in_order=made.in_order,
                takes_offers=scenario.takes_offers,
            )
        except ValueError:
            continue  # a schedule that does not fit the longer step
        cluster = NotesStarts(scenario)
        assert cluster.run() == (Ending.FINISHED, "")
        assert [cluster.starts[node.rank] for node in cluster.nodes] == [
            [(span.task, span.start) for span in stage] for stage in expected.spans
        ], f"seed {seed}"
        compared[graph.is_chain] += 1
    assert compared[True] > 50
    assert compared[False] > 8


class NotesStarts(FaultCluster):
    """Notes each task that began on a rank, and when, in seconds."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.starts: dict[int, list[tuple[Task, float]]] = {node.rank: [] for node in self.nodes}

    def begin(self, nodes: Sequence[Any]) -> None:
        for node in nodes:
            self.starts[node.rank].append((node.lane[0], self.queue.now))
        super().begin(nodes)
