"""Faults while forwards that replicas share are offered, claimed, given or under way: one named error on every rank.

`rrfp check faults` draws such runs, too; here each message of small steps is hit by each fault.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import sim.broken_claims as broken
from sim.fault_cases import FORWARD, TRAIN, limited, output, scenario

from rrfp.lab.faults.cluster import FaultCluster
from rrfp.lab.faults.faults import (
    AnyId,
    ClaimMessageId,
    ClaimSort,
    Death,
    Delay,
    Duplicate,
    Fault,
    Lose,
    Pause,
    Swap,
)
from rrfp.lab.faults.scenario import Parallelism, Scenario, SharedForwards
from rrfp.memory.admission import Limit
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import Layout
from rrfp.model.tasks import Mode, Task
from rrfp.testing.faults import Ending, make_scenario, run_scenario

ONE_STEP = ((TRAIN, 4),)
STEPS = ((TRAIN, 3), (FORWARD, 2), (TRAIN, 2), (TRAIN, 2))


def shared(
    *faults: Fault,
    steps: tuple[tuple[Mode, int], ...] = ONE_STEP,
    limit: int | None = 2,
    copies: int = 2,
    stages: int = 2,
    chunks: int = 1,
    layout: Layout = "looped",
    slow: float = 1.0,
    held: tuple[int, ...] = (),
) -> Scenario:
    """The callers have the microbatches in turn; replica 0 may be slow, which all know.

    ``held``: bytes by microbatch, under a limit that the largest fits exactly.
    """
    graph = TaskGraph.chain(stages, chunks=chunks, layout=layout)
    one = limited(scenario(*faults, graph=graph, steps=steps), Limit(limit, max(held, default=None)))
    homes = tuple(tuple(m % copies for m in range(count)) for _, count in steps)
    paces = ((slow, *(1.0,) * (copies - 1)),) * stages
    pool = SharedForwards(homes, depth=2, paces=paces, are_known=slow > 1, bytes_held=held)
    return replace(one, parallelism=Parallelism(replicas=copies), shared=pool)


CASES = {
    "one step": shared(),
    "four steps": shared(steps=STEPS, limit=1),
    "three copies, one is slow": shared(limit=None, copies=3, slow=3.0),
    "one stage": shared(stages=1, slow=3.0),
    "two chunks": shared(chunks=2, limit=1),
    "a V under a limit on bytes": shared(chunks=2, layout="v", held=(3, 1, 2, 3)),
}


@functools.cache
def sent_in(name: str) -> list[tuple[float, AnyId]]:
    """What is sent in a case without a fault, and when."""
    cluster = FaultCluster(CASES[name])
    assert cluster.run() == (Ending.FINISHED, "")
    assert not cluster.violations
    return cluster.network.sent


@pytest.mark.parametrize("name", CASES)
def test_each_case_says_all_that_there_is_to_say(name: str) -> None:
    one, sent = CASES[name], [message for _, message in sent_in(name)]
    copies, stage_of = one.parallelism.replicas, one.graph.stage_of
    links = sum(before != here for before, here in pairwise(stage_of))  # what follows on its stage is claimed with it
    count = sum(step.microbatches for step in one.steps if step.mode is TRAIN)
    by_sort = Counter(message.sort for message in sent)
    assert by_sort["offer"] == count * links * copies
    # To all copies but the one that runs it; and to that one as well where it is not the caller's.
    assert by_sort["grant"] == count * (links + 1) * (copies - 1)
    assert by_sort["claim"] >= count * links


def faults_of(message: AnyId) -> list[Fault]:
    return [
        Lose(message),
        Duplicate(message, lag=0.0),
        Duplicate(message, lag=3.0),
        Swap(message),
        Delay(message, is_copy=False),
        Delay(message, is_copy=True),
    ]


@pytest.mark.every_other
@pytest.mark.parametrize("name", CASES)
def test_whichever_message_a_fault_hits_the_run_ends_as_it_must(name: str) -> None:
    for _, message in sent_in(name):
        for fault in faults_of(message):
            run = run_scenario(replace(CASES[name], faults=(fault,)))
            assert not run.problems, f"{fault}: {run.problems[0]}"


#: From the moment when a message leaves: at once, on its way, and just after it has come.
MOMENTS = (0.0, 0.005, 0.011)


@pytest.mark.every_other
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("drops", [True, False])
def test_whatever_is_said_of_a_forward_when_a_rank_dies_every_other_one_names_it(name: str, *, drops: bool) -> None:
    for time, message in sent_in(name):
        for rank in {message.sender, message.receiver} if isinstance(message, ClaimMessageId) else ():
            for later in MOMENTS:
                death = Death(rank, time + later, detection=0.02, drops=drops)
                run = run_scenario(replace(CASES[name], faults=(death,)))
                assert not run.problems, f"{death}: {run.problems[0]}"
                assert run.ending is Ending.ABORTED
                assert f"(rank {int(rank)}): PeerLostError" in run.text


@pytest.mark.every_other
@pytest.mark.parametrize("name", CASES)
def test_a_rank_that_pauses_over_a_message_delays_the_others_and_harms_nobody(name: str) -> None:
    for time, message in sent_in(name):
        for rank in (message.sender, message.receiver):
            run = run_scenario(replace(CASES[name], faults=(Pause(rank, time, 2.5),)))
            assert (run.ending, run.problems) == (Ending.FINISHED, ())


# What the errors say. Both replicas' forwards take a second and are claimed at once, with two microbatches each.


def said(sort: ClaimSort, forward: str, sender: tuple[int, int], receiver: tuple[int, int]) -> ClaimMessageId:
    at = {(rank.stage, rank.replica): rank for rank in shared().ranks}
    return ClaimMessageId(0, sort, Task.parse(forward), at[sender], at[receiver])


def ending(*faults: Fault) -> tuple[Ending, str]:
    run = run_scenario(shared(*faults))
    assert run.problems == ()
    return run.ending, run.text


def test_a_lost_grant_stalls_and_is_named() -> None:
    how, text = ending(Lose(said("grant", "F1@0", (0, 1), (0, 0))))
    assert how is Ending.STALLED
    assert "stage 0 replica 0 waits for grant F1@0, which stage 0 replica 1 sent, and which never arrived" in text


def test_a_lost_claim_harms_nobody_where_another_copy_claims_the_forward() -> None:
    assert ending(Lose(said("claim", "F0@1", (1, 0), (0, 0)))) == (Ending.FINISHED, "")


def test_a_lost_claim_stalls_and_is_named_where_the_other_copy_is_too_slow_to_claim_the_forward() -> None:
    lose = Lose(said("claim", "F0@0", (0, 1), (0, 0)))
    run = run_scenario(shared(lose, steps=((TRAIN, 1),), slow=3.0))
    assert (run.ending, run.problems) == (Ending.STALLED, ())
    assert "stage 0 replica 0 waits for claim F0@0, which stage 0 replica 1 sent, and which never arrived" in run.text


def test_a_lost_offer_is_found_when_the_forward_is_granted_to_another_copy() -> None:
    how, text = ending(Lose(said("offer", "F0@1", (0, 0), (1, 1))))
    assert how is Ending.REFUSED
    assert text.endswith("ProtocolError: microbatch 0 was granted before it was offered")


def test_a_lost_output_is_named_with_the_copy_that_has_claimed_it() -> None:
    first, second = (rank for rank in shared().ranks if not rank.replica)
    how, text = ending(Lose(output("F0@0", first, second)))
    assert how is Ending.STALLED
    assert "stage 1 replica 0 waits for F0@0, which stage 0 replica 0 sent, and which never arrived" in text


def test_a_lost_grant_of_a_deeper_chunk_is_named_with_its_virtual_stage() -> None:
    grants = (m for _, m in sent_in("two chunks") if isinstance(m, ClaimMessageId) and m.sort == "grant")
    grant = next(message for message in grants if message.about.virtual_stage == 2)
    run = run_scenario(replace(CASES["two chunks"], faults=(Lose(grant),)))
    assert (run.ending, run.problems) == (Ending.STALLED, ())
    assert f"waits for grant {grant.about}, which " in run.text


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (said("offer", "F0@1", (0, 0), (1, 1)), "microbatch 0 was offered twice: by copy 0"),
        (said("claim", "F0@1", (1, 0), (0, 0)), "copy 0 claimed microbatch 0 twice"),
        (said("grant", "F1@0", (0, 1), (0, 0)), "microbatch 1 was granted twice: to copy 1 and copy 1"),
    ],
)
def test_what_is_said_twice_is_refused(message: AnyId, error: str) -> None:
    how, text = ending(Duplicate(message, lag=0.0))
    assert (how, error in text) == (Ending.REFUSED, True), text


# What is broken must be found, in runs that are drawn.


@functools.cache
def drawn() -> list[Scenario]:
    return [one for one in map(make_scenario, range(1_200)) if one.shared is not None]


def test_the_runs_that_are_drawn_have_everything_that_they_should() -> None:
    made = drawn()
    assert 60 < len(made) < 240
    assert {one.parallelism.replicas for one in made} == {2, 3}
    assert {len(one.limits) for one in made} == {1, 2, 3}
    shapes = {(one.graph.placement.chunks, one.graph.placement.layout) for one in made}
    assert shapes >= {(chunks, layout) for chunks in (2, 3) for layout in ("looped", "v")}
    rooms = [(one.limits[0].bytes, one.most_held) for one in made if one.limits[0].bytes is not None]
    assert any(room < largest for room, largest in rooms)
    assert any(room > largest for room, largest in rooms)
    pools = [one.shared for one in made if one.shared is not None]
    assert {pool.depth for pool in pools} == {1, 2, 3}
    assert {pool.are_known for pool in pools} == {pool.is_even for pool in pools} == {True, False}
    assert {one.takes_offers for one in made} == {True, False}
    assert any(one.sizes for one in made)
    hit = {fault.message.sort for one in made for fault in one.faults if isinstance(fault, Lose)}
    assert hit >= {"", "offer", "claim", "grant"}
    assert any(isinstance(fault, Death) for one in made for fault in one.faults)


@pytest.mark.parametrize(
    ("break_it", "objection"),
    [
        (broken.gives_twice, "which keeps the contract"),
        (broken.skips_the_limit, "forwards and has room for"),
        (broken.counts_no_claims, "forwards, the most allowed is"),
        (broken.keeps_a_lost_claim, "it stalled, and no message was lost"),
        (broken.helps_nobody, "it stalled, and no message was lost"),
        (broken.tells_nobody, "it stalled, and no message was lost"),
        (broken.leaves_gradients_in_its_replica, "which has not run the forward"),
        (broken.fits_or_nothing, "it stalled, and no message was lost"),
        (broken.drops_what_it_holds, "its output was dropped"),
        (broken.refuses_late_claims, "was claimed after the step"),
        (broken.takes_what_comes_twice, "which arrived twice"),
        (broken.takes_what_comes_twice, "which overtook its offer"),
        (broken.goes_on_when_aborted, "wants to run"),
        (broken.answers_when_aborted, "after it was aborted"),
    ],
)
def test_what_is_broken_is_found(
    monkeypatch: pytest.MonkeyPatch, break_it: Callable[[pytest.MonkeyPatch], Any], objection: str
) -> None:
    scenarios = drawn()
    break_it(monkeypatch)
    problems: list[str] = []
    for one in scenarios:
        problems += run_scenario(one).problems
        if any(objection in what for what in problems):
            return
    raise AssertionError(problems[:5])
