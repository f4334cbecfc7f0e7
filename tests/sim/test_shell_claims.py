"""Replicas that share forwards: the real shell in virtual time runs what the simulated cluster runs, task by task."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sim.shell.claims import ClaimedCase, SimulatedClaims, run_shell_claims

from rrfp.memory.admission import Limit
from rrfp.memory.round_trips import Pace, RoundTripRule
from rrfp.model.graph import TaskGraph
from rrfp.runtime.steps.dealer import FEW

V = TaskGraph.chain(2, chunks=2, layout="v", split=True)

CASES = [
    ClaimedCase(TaskGraph.chain(3), (5, 4), "slot-aware", Limit(3), 1),
    ClaimedCase(TaskGraph.chain(2, split=True), (3, 4, 3), "bfw", Limit(2), 2, slow={1: 3.0}),
    ClaimedCase(TaskGraph.chain(2, split=True), (6, 5), "slot-aware", Limit(bytes=20), 3, has_bytes=True),
    ClaimedCase(TaskGraph.chain(2), (6, 5), "bf", Limit(4, bytes=12), 4, has_bytes=True, slow={3: 2.0}),
    ClaimedCase(TaskGraph.chain(2, chunks=2), (5, 6), "slot-aware", Limit(2), 5, slow={0: 2.0}),
    ClaimedCase(V, (4, 5), "bfw", Limit(2), 6, slow={2: 3.0}),
    ClaimedCase(V, (5, 4), "slot-aware", Limit(3, bytes=40), 7, has_bytes=True, slow={1: 3.0}),
    ClaimedCase(TaskGraph.chain(1, chunks=2), (5, 3), "bf", Limit(1), 8),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_shell_runs_what_the_simulated_cluster_runs(case: ClaimedCase) -> None:
    simulated, shell = SimulatedClaims(case).run(), run_shell_claims(case)
    assert shell.orders == simulated.orders
    assert shell.seconds == pytest.approx(simulated.seconds)
    homes = case.homes
    ran = [(case.mesh.place_of(rank).replica, task) for rank, order in enumerate(shell.orders[0]) for task in order]
    assert any(homes[task.microbatch] != replica for replica, task in ran), "nobody helped"


EVEN = ClaimedCase(TaskGraph.chain(3), (12, 12), "slot-aware", Limit(), 0)


@pytest.mark.parametrize("link", [0.1, 1.0, 3.5, 6.0])
def test_on_slow_links_auto_gives_the_slots_and_the_claims_ahead_that_are_of_use(link: float) -> None:
    """Every message takes ``link`` where a period takes 3: more of either makes a step no shorter, fewer do."""
    rule, pace = RoundTripRule(EVEN.graph, claims=True), Pace(3.0, 0.0, {(0, 1): 2 * link, (1, 2): 2 * link})
    limits, ahead = rule.limits(pace), rule.claimed_ahead(pace)

    def seconds(limits: tuple[int, ...], ahead: tuple[int, ...]) -> float:
        return SimulatedClaims(replace(EVEN, link=link, limits=limits, ahead=ahead, steps=1)).run().seconds[0]

    best = seconds((24,) * 3, (24,) * 3)
    assert seconds(limits, ahead) == pytest.approx(best)
    assert seconds((3, 2, 1), ahead) > best
    assert seconds(limits, (1,) * 3) > best or link <= 1.5


def test_even_replicas_wait_for_no_claim_before_the_pipeline_is_full() -> None:
    """Until their paces are known they claim the first microbatch, too: two more messages for each link."""
    link, count = 0.125, 12
    ran = run_shell_claims(replace(EVEN, link=link, steps=FEW + 1))
    alone = 2 * (1.0 + link) + 3.0 * count + 2 * (2.0 + link)
    assert ran.seconds == pytest.approx((*[alone + 4 * link] * FEW, alone))


def test_auto_follows_the_links_where_replicas_share_forwards() -> None:
    case = replace(EVEN, hint="bf", link=3.0, is_auto=True, limit=Limit(3), steps=5)
    ran = run_shell_claims(case)
    rule, pace = RoundTripRule(case.graph, claims=True), Pace(3.0, 0.0, {(0, 1): 6.0, (1, 2): 6.0})
    assert ran.slots[-1] == rule.limits(pace)
    for slots, held in zip(ran.slots, ran.held, strict=True):
        assert all(most is not None and peak <= most for peak, most in zip(held, slots, strict=True))
    assert ran.seconds[-1] < 0.7 * ran.seconds[0]
