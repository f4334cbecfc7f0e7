"""The rule of ``limit="auto"`` and its hysteresis: measures in, limits out."""

from __future__ import annotations

import pytest

from rrfp.core import events as ev
from rrfp.core.stage_core import StageCore
from rrfp.errors import ConfigError
from rrfp.hints.registry import create_hint
from rrfp.memory.admission import Limit
from rrfp.memory.round_trips import FollowedLimits, Pace, RoundTripRule, StageMeasure
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import TablePlacement
from rrfp.model.tasks import Mode


def limits(graph: TaskGraph, round_trips: dict[tuple[int, int], float], spread: float = 0.0) -> tuple[int, ...]:
    return RoundTripRule(graph).limits(Pace(1.0, spread, round_trips))


def test_every_stage_before_a_link_gets_a_slot_for_each_period_of_its_round_trip() -> None:
    chain = TaskGraph.chain(4)
    assert limits(chain, {}) == (4, 3, 2, 1)
    assert limits(chain, {(2, 3): 2.4}) == (7, 6, 5, 1)
    assert limits(chain, {(0, 1): 0.3, (1, 2): 1.0}) == (6, 4, 2, 1)


def test_a_round_trip_that_hardly_takes_time_counts_as_none() -> None:
    assert limits(TaskGraph.chain(3), {(0, 1): 0.04, (1, 2): 0.06}) == (4, 3, 1)


def test_durations_that_differ_take_slots_of_their_own() -> None:
    assert limits(TaskGraph.chain(4), {}, 0.05) == (4, 3, 2, 1)
    assert limits(TaskGraph.chain(4), {}, 0.5) == (6, 5, 3, 2)


def test_with_several_chunks_it_counts_from_n_and_every_crossing() -> None:
    looped, v = TaskGraph.chain(3, chunks=2), TaskGraph.chain(3, chunks=2, layout="v")
    assert limits(looped, {}) == (3, 3, 3)
    assert limits(looped, {(0, 1): 1.5}) == (3 + 4, 3 + 2, 3 + 2)  # stages 1 and 2 have one crossing before them
    assert limits(looped, {(0, 2): 1.5}) == (3 + 2, 3 + 2, 3 + 2)
    assert limits(v, {(1, 2): 1.5}) == (3 + 4, 3 + 4, 3 + 2)


def test_where_replicas_share_forwards_a_link_counts_twice_and_its_claims_take_slots_too() -> None:
    rule = RoundTripRule(TaskGraph.chain(4), claims=True)
    assert rule.limits(Pace(1.0, 0.0, {})) == (4, 3, 2, 1)
    assert rule.claimed_ahead(Pace(1.0, 0.0, {})) == (1, 1, 1, 1)
    pace = Pace(1.0, 0.0, {(1, 2): 1.2})
    assert rule.limits(pace) == (4 + 3, 3 + 3, 2 + 2, 1)
    assert rule.claimed_ahead(pace) == (3, 1, 3, 1), "the first stage's ranks claim from each other"
    with pytest.raises(ConfigError, match="limit is 'auto' with 2 chunks a stage, must be 'n'"):
        RoundTripRule(TaskGraph.chain(2, chunks=2), claims=True)


def test_on_a_graph_the_longest_way_to_the_end_counts() -> None:
    placement = TablePlacement((0, 1, 2, 3))
    graph = TaskGraph(placement, ((0, 2), (1, 2), (2, 3)))
    assert limits(graph, {}) == (3, 3, 2, 1)
    assert limits(graph, {(1, 2): 1.5}) == (3, 5, 2, 1)


@pytest.mark.parametrize(
    "graph",
    [
        TaskGraph(TablePlacement((0, 1, 1))),
        TaskGraph(TablePlacement((0, 1, 0, 1)), ((0, 2), (1, 2), (2, 3))),
    ],
)
def test_graphs_whose_rule_is_not_known_are_refused(graph: TaskGraph) -> None:
    with pytest.raises(ConfigError, match="limit is 'auto' on a graph or a placement"):
        RoundTripRule(graph)


def measures(trip: float, spread: float = 0.0) -> list[StageMeasure]:
    return [StageMeasure(1.0, spread, {1: trip}), StageMeasure(1.0, spread, {2: 0.0}), StageMeasure(1.0, spread)]


def test_it_rises_by_doubling_to_the_median_and_falls_by_half_to_the_longest() -> None:
    follows = FollowedLimits(TaskGraph.chain(3))
    seen = []
    for trip in (0, 0, 9.5, 0, 9.5, 9.5, 9.5, 0, 0, 0, 0):
        follows.observe(measures(trip))
        seen.append(follows.now[0])
    assert seen == [3, 3, 3, 3, 6, 12, 13, 13, 13, 7, 4]
    assert follows.now[1:] == (2, 1)


def test_only_a_change_is_told_with_its_reason() -> None:
    follows = FollowedLimits(TaskGraph.chain(3))
    assert follows.observe(measures(0)) is None
    follows = FollowedLimits(TaskGraph.chain(3))
    change = follows.observe(measures(1.5))
    assert change is not None
    assert (change.before, change.now) == ((3, 2, 1), (5, 2, 1))
    assert "stages 0-1 1.5e+03 ms (1.5 periods)" in str(change)


def test_the_cap_bounds_what_this_rank_holds_and_not_what_ranks_agree_on() -> None:
    follows = FollowedLimits(TaskGraph.chain(3), most=4)
    follows.observe(measures(1.5))
    assert (follows.own(0), follows.own(1), follows.now) == (4, 2, (5, 2, 1))


def test_both_ends_of_a_link_are_heard_and_a_step_without_tasks_changes_nothing() -> None:
    one, other = StageMeasure(1.0, 0.0, {1: 0.5}), StageMeasure(1.0, 0.0, {0: 2.5})
    assert Pace.of([one, other]).round_trips == {(0, 1): 2.5}
    assert RoundTripRule(TaskGraph.chain(2)).limits(Pace.of([StageMeasure.of([], {1: 3.0}), StageMeasure()])) == (2, 1)


def test_auto_is_a_limit_of_its_own() -> None:
    assert Limit.resolve("auto", 0, 4) == Limit(auto=True)
    assert Limit(6, bytes=80, auto=True).at(9) == Limit(6, bytes=80)
    assert Limit(6, bytes=80, auto=True).at(3) == Limit(3, bytes=80)
    with pytest.raises(ConfigError, match="limit: auto is 1, must be True or False"):
        Limit(auto=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="limit: auto must be False with rule 'paper'"):
        Limit(auto=True, rule="paper")


def test_a_core_holds_what_its_step_was_opened_with() -> None:
    core = StageCore(TaskGraph.chain(2), 0, create_hint("bf"), Limit(2))
    core.apply(ev.StepOpened(0, Mode.TRAIN, 4, limit=3))
    assert core.view.slots == 3
    core = StageCore(TaskGraph.chain(2), 0, create_hint("bf"), Limit(2))
    core.apply(ev.StepOpened(0, Mode.TRAIN, 4))
    assert core.view.slots == 2
