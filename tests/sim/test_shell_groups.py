"""The real shell with groups, in virtual time: what the simulator tells of the same arguments, to the last bit.

Results are compared with ``==``: spans are frozen dataclasses of floats, so nothing here is approximate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from batches import examples
from hypothesis import event, given
from hypothesis import strategies as st
from sim.shell.group_lane import Meetings
from sim.shell.groups import GroupRun, Replica, run_shell_groups
from sim.tables import table, tables
from sim.tp_cases import any_makers, latencies, latencies_of, limits_of, settled_makers

from rrfp import Hint
from rrfp.core.ready_set import ForcedOrder
from rrfp.core.usage import Peaks
from rrfp.costs import CostTable, make_costs, with_jitter
from rrfp.engine.engine import graph_of
from rrfp.errors import ConfigError, ProtocolError
from rrfp.hints.registry import create_hint
from rrfp.lab.cluster.coordination import Agreement, Leader
from rrfp.lab.cluster.simulation import TensorParallelResult, run_tensor_parallel
from rrfp.lab.generators.latency import Cube, RankLatencies, rank_latencies
from rrfp.memory.admission import Limit
from rrfp.model.tasks import Kind, Mode, Task

COSTS = table([[1, 1], [1, 1]], [[2, 2], [2, 2]])


def bf() -> Hint:
    return create_hint("bf")


def same(shell: GroupRun, simulated: TensorParallelResult, replica: int = 0, *, has_ties: bool = False) -> None:
    """Every order, start, end, message and peak.

    ``has_ties``: an input may come at the very instant at which a task is enqueued without a decision, because its
    round has ended. It is counted as received before or after that: neither order is wrong.
    """
    stages = range(len(simulated.spans))
    assert tuple(shell.spans(stage, replica=replica) for stage in stages) == simulated.spans
    assert tuple(shell.orders(stage, replica=replica) for stage in stages) == simulated.orders
    by_edge = sorted(simulated.messages, key=lambda message: (message.source, message.target, message.task))
    assert shell.messages(replica=replica) == tuple(by_edge)
    if shell.mesh.replicas == 1:
        expected = tuple(peaks for of_stage in simulated.rank_peaks for peaks in of_stage)
        assert shell.peaks == expected or (has_ties and alike(shell.peaks) == alike(expected))


def alike(peaks: tuple[Peaks, ...]) -> list[Peaks]:
    """Without the inputs that were received and not used."""
    return [replace(each, received=0) for each in peaks]


def has_ties(costs: CostTable, ranks: RankLatencies) -> bool:
    """Whether two times are equal."""
    times = np.concatenate([every.ravel() for every in (costs.forward, costs.backward, ranks.forward, ranks.backward)])
    return len(np.unique(times)) < times.size


@st.composite
def forced(draw: st.DrawFn, costs: CostTable) -> list[ForcedOrder]:
    kinds = [Kind.F, Kind.B, Kind.W] if costs.split else [Kind.F, Kind.B]
    pairs = [(kind, v) for kind in kinds for v in range(costs.num_virtual_stages)]
    return draw(st.just([]) | st.lists(st.sampled_from(pairs), max_size=4))


@st.composite
def delays_of(draw: st.DrawFn, costs: CostTable, ranks: int) -> dict[Kind, Cube]:
    if draw(st.integers(0, 2)):
        return {}
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (*costs.forward.shape, ranks)
    return {Kind.F: random.choice([0.0, 0.5, 1.0], shape), Kind.B: random.exponential(1.0, shape)}


# A leader.


@examples(100)
@given(data=st.data(), costs=tables(), make=any_makers())
def test_a_leader_at_depth_one_whose_words_take_no_time_does_what_the_simulator_says(
    data: st.DataObject, costs: CostTable, make: Callable[[], Hint]
) -> None:
    limits, ranks, in_order = data.draw(limits_of(costs)), data.draw(latencies_of(costs)), data.draw(forced(costs))
    delays = data.draw(delays_of(costs, ranks.ranks))
    leader = Leader(depth=1, control_seconds=0)
    shell = run_shell_groups([Replica(costs, ranks, delays)], make, limits, leader, in_order=in_order)
    same(shell, run_tensor_parallel(costs, ranks, make, limits, leader, delays=delays, in_order=in_order))


@examples(100)
@given(
    data=st.data(),
    costs=tables(),
    make=any_makers(),
    depth=st.integers(1, 3),
    control=st.sampled_from([0.0, 1e-3, 0.5, 10.0]),
)
def test_a_leader_ahead_of_its_slow_words_does_what_the_simulator_says(
    data: st.DataObject, costs: CostTable, make: Callable[[], Hint], depth: int, control: float
) -> None:
    limits, ranks, in_order = data.draw(limits_of(costs)), data.draw(latencies_of(costs)), data.draw(forced(costs))
    delays, leader = data.draw(delays_of(costs, ranks.ranks)), Leader(depth, control)
    shell = run_shell_groups([Replica(costs, ranks, delays)], make, limits, leader, in_order=in_order)
    same(shell, run_tensor_parallel(costs, ranks, make, limits, leader, delays=delays, in_order=in_order))


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("coordination", [Leader(), Leader(depth=2), Agreement()])
def test_they_agree_on_a_realistic_step(tp: int, coordination: Leader | Agreement) -> None:
    costs = with_jitter(make_costs("mllm", 4, 12, seed=3, latency="spike"), "J2", seed=5)
    ranks, limits = rank_latencies(costs, "spike", tp, seed=1), [Limit(8)] * 4
    same(
        run_shell_groups([Replica(costs, ranks)], bf, limits, coordination),
        run_tensor_parallel(costs, ranks, bf, limits, coordination),
    )


def test_training_and_forward_only_steps_follow_each_other() -> None:
    costs = table([[1, 1], [2, 2]], [[1, 1], [2, 2]])
    ranks = latencies([[[0, 1], [1, 0]]], [[[0, 2], [0, 0]]])
    modes = [Mode.TRAIN, Mode.FORWARD, Mode.TRAIN, Mode.FORWARD]
    run = run_shell_groups([Replica(costs, ranks)], bf, [Limit(1), Limit(1)], Leader(2, 0.25), modes=modes)
    for stage in range(2):
        train, forward, again, last = (
            [replace(span, start=span.start, end=span.end) for span in run.spans(stage, step=step)] for step in range(4)
        )
        assert (train, forward) == (again, last)
        assert {span.task.kind for span in forward} == {Kind.F}
    assert all(peaks.held <= 1 for peaks in run.peaks)


# Agreement.


@examples(100)
@given(data=st.data(), costs=tables(), make=settled_makers(), gather=st.sampled_from([0.0, 1e-3, 0.5, 10.0]))
def test_agreement_does_what_the_simulator_says(
    data: st.DataObject, costs: CostTable, make: Callable[[], Hint], gather: float
) -> None:
    limits, ranks, in_order = data.draw(limits_of(costs)), data.draw(latencies_of(costs)), data.draw(forced(costs))
    delays, agreement = data.draw(delays_of(costs, ranks.ranks)), Agreement(gather)
    event(f"{ranks.ranks} ranks")
    run = run_shell_groups([Replica(costs, ranks, delays)], make, limits, agreement, in_order=in_order)
    simulated = run_tensor_parallel(costs, ranks, make, limits, agreement, delays=delays, in_order=in_order)
    # Where ranks disagree, an input that comes at the very instant of a round is in it or not: both are right.
    if not has_ties(costs, ranks) or not any(counts.failed_rounds for counts in simulated.counts):
        same(run, simulated, has_ties=True)
    graph = graph_of(costs)
    for stage in range(costs.stages):
        (order,) = set(run.orders(stage))
        assert sorted(order) == sorted(graph.tasks(stage, costs.microbatches))
        most = limits[stage].microbatches
        assert most is None or all(
            run.peaks[rank].held <= most * costs.chunks
            for rank in range(run.mesh.size)
            if run.mesh.place_of(rank)[0] == stage
        )


# Replicas.


@pytest.mark.parametrize("coordination", [Leader(2, 0.01), Agreement(0.01)])
def test_replicas_of_groups_run_side_by_side(coordination: Leader | Agreement) -> None:
    """Two replicas with different numbers of microbatches: each does what it does alone, and all tell one result."""
    tables = [make_costs("mllm", 2, count, seed=count, latency="spike") for count in (3, 5)]
    replicas = [Replica(costs, rank_latencies(costs, "spike", 2, seed=7)) for costs in tables]
    limits = [Limit(2), Limit(2)]
    run = run_shell_groups(replicas, bf, limits, coordination, modes=[Mode.TRAIN, Mode.FORWARD, Mode.TRAIN])
    alone = [run_shell_groups([one], bf, limits, coordination) for one in replicas]
    for replica in range(2):
        for stage in range(2):
            assert run.spans(stage, replica=replica) == alone[replica].spans(stage)
            assert run.orders(stage, replica=replica) == alone[replica].orders(stage)
    for step, mode in enumerate((Mode.TRAIN, Mode.FORWARD, Mode.TRAIN)):
        results = [results[step] for results in run.results]
        assert len({result.seconds for result in results}) == 1
        assert {result.loss for result in results} == {0.0}
        for rank, result in enumerate(results):
            replica = run.mesh.place_of(rank).replica
            assert (result.mode, result.microbatches) == (mode, tables[replica].microbatches)
            assert len(result.losses) == tables[replica].microbatches
            for parts in result.breakdown:
                assert sum(parts.by_cause.values()) + parts.compute + parts.other == pytest.approx(result.seconds)
            assert result.peak_held == alone[replica].results[0][0].peak_held or mode is Mode.FORWARD


def test_the_breakdown_of_a_stage_is_its_leaders() -> None:
    slow = latencies([[[1, 5], [1, 1]]], [[[0, 0], [0, 0]]])
    run = run_shell_groups([Replica(COSTS, slow)], bf, [Limit(2), Limit(1)], Leader(1, 0))
    assert [(str(span.task), span.start) for span in run.spans(1)] == [
        ("F1@1", 3),
        ("B1@1", 4),
        ("F0@1", 6),
        ("B0@1", 7),
    ]
    for rank in range(4):
        parts = run.results[rank][0].breakdown[1]
        # F0 is there at 2, the follower reports it at 6: by then F1 was run, and B1 until 6.
        assert (parts.input, parts.order, parts.compute) == (2, 1, 6)


def test_the_peaks_of_a_stage_are_those_of_its_worst_rank() -> None:
    slow = latencies([[[0, 5], [0, 5]]], [[[0, 0], [0, 0]]])
    run = run_shell_groups([Replica(COSTS, slow)], bf, [Limit(2), Limit(2)], Leader(1, 0))
    received = [peaks.received for peaks in run.peaks]
    assert received[2] > received[3]
    assert run.results[3][0].peaks[1].received == received[2]


# The lanes.


def test_ranks_that_come_together_for_different_tasks_are_refused() -> None:
    meetings, one, other = Meetings(2), Task(Kind.F, 0, 0), Task(Kind.F, 1, 0)
    meetings.reach(0, 1, one, 1.0)
    with pytest.raises(ProtocolError) as caught:
        meetings.reach(0, 0, other, 1.0)
    assert str(caught.value) == (
        "collective mismatch: member 0 of the group runs F1@0 as number 0, where member 1 runs F0@0"
    )


def test_tables_of_different_shape_are_refused() -> None:
    ranks = RankLatencies.same_on_all(COSTS, 2)
    other = table([[1, 1, 1], [1, 1, 1]], [[1, 1, 1], [1, 1, 1]])
    with pytest.raises(ConfigError, match="latencies have shape"):
        run_shell_groups([Replica(other, ranks)], bf, [Limit(), Limit()], Leader())
