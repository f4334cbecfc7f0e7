"""Every interleaving of small steps whose replicas share forwards: no deadlock, limits kept, each microbatch once.

What is wrong with a broken core must be found, whether or not orders that make no difference are left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import sim.broken_claims as broken
from sim.claim_search import ClaimCase, ClaimSearch

#: None is slow, by half, by far: between these lie the thresholds from which on a copy is helped, and from which on it
#: declines a forward. Equal paces are as none known: no copy counts as slow.
PACES = ((1.0, 1.0), (1.5, 1.0), (1.0, 1.5), (4.0, 1.0), (1.0, 4.0))

QUICK = [
    ClaimCase(1, 2, (0, 0)),
    ClaimCase(1, 2, (0, 0, 1), paces=((3.0, 1.0),)),
    ClaimCase(1, 2, (0, 0, 0, 1), limit=2, depth=2),
    ClaimCase(2, 2, (0,)),
    ClaimCase(2, 2, (0, 1)),
    ClaimCase(2, 2, (0, 0), limit=2, depth=2),
    ClaimCase(3, 2, (0,)),
    ClaimCase(1, 2, (0, 0, 1), limit=2, most_bytes=3, sizes=(1, 2, 3)),
    ClaimCase(1, 2, (0, 1), split=True, chunks=2),
    ClaimCase(2, 2, (0,), chunks=2),
    ClaimCase(2, 2, (0, 1, 1), is_even=True),
    ClaimCase(2, 2, (0, 0, 1), limit=2, depth=2, split=True, is_even=True),
    ClaimCase(2, 2, (0, 0, 1), limit=2, most_bytes=1, sizes=(1, 2, 1), is_even=True),
]
SPLIT = [ClaimCase(1, 3, (0, 0, 1), split=True), ClaimCase(2, 2, (0, 1), limit=2, depth=2, split=True)]
ALL = [
    ClaimCase(2, 2, (0, 0), limit=2, most_bytes=1, sizes=(1, 2)),
    ClaimCase(1, 2, (0, 0, 1), limit=3, depth=2, split=True, most_bytes=3, sizes=(1, 2, 2)),
    ClaimCase(2, 2, (0,), chunks=2, layout="v", split=True),
    ClaimCase(2, 2, (0, 1), chunks=2, layout="v"),
    ClaimCase(2, 2, (0,), chunks=3, layout="v", depth=2),
    *SPLIT,
    ClaimCase(2, 2, (0, 0, 1)),
    ClaimCase(2, 2, (0, 0, 1), limit=2, depth=2),
    ClaimCase(2, 3, (0, 1)),
    ClaimCase(3, 2, (0, 1)),
    ClaimCase(2, 2, (0, 0, 1, 1), is_even=True),
    ClaimCase(3, 2, (0, 1, 1), is_even=True),
    ClaimCase(2, 3, (0, 1, 2, 0), is_even=True),
    ClaimCase(2, 2, (0, 1), chunks=2, is_even=True),
    ClaimCase(2, 2, (0, 1), chunks=2, layout="v", is_even=True),
]

#: Minutes of states.
LONG = [pytest.mark.long, pytest.mark.timeout(900)]


def marked(quick: list[ClaimCase], long: list[ClaimCase]) -> list[Any]:
    return [*quick, *(pytest.param(case, marks=LONG) for case in long)]


@pytest.mark.parametrize("case", marked(QUICK, ALL), ids=str)
def test_no_interleaving_deadlocks_passes_a_limit_or_runs_a_task_twice(case: ClaimCase) -> None:
    found = ClaimSearch(case).run()
    assert not found.wrong
    assert found.ends
    assert found.peak_held <= case.limit * case.chunks


@pytest.mark.every_other
@pytest.mark.parametrize("homes", [(0,), (0, 1), pytest.param((0, 0, 1), marks=LONG)], ids=str)
@pytest.mark.parametrize("paces", [*itertools.product(PACES, PACES)], ids=str)
def test_whichever_copy_of_a_stage_is_slow_and_however_much(
    paces: tuple[tuple[float, ...], ...], homes: tuple[int, ...]
) -> None:
    found = ClaimSearch(ClaimCase(2, 2, homes, limit=2, paces=paces)).run()
    assert not found.wrong
    assert found.ends


@pytest.mark.parametrize("case", marked([*QUICK[:5], QUICK[-3]], [QUICK[5], *SPLIT]), ids=str)
def test_what_is_left_out_changes_neither_the_ends_nor_what_is_held(case: ClaimCase) -> None:
    every, reduced = ClaimSearch(case, reduce=False).run(), ClaimSearch(case).run()
    assert reduced.states < every.states
    assert (reduced.ends, reduced.takers, reduced.peak_held) == (every.ends, every.takers, every.peak_held)
    assert not every.wrong


def test_without_paces_every_copy_may_run_every_forward() -> None:
    found = ClaimSearch(ClaimCase(1, 2, (0, 0))).run()
    # The holder takes one at once; the other goes to whichever asks first.
    assert found.takers == {((0, 0),), ((0, 1),)}


# A rank that fails at any moment.

ABORTED = [
    ClaimCase(1, 2, (0, 0)),
    ClaimCase(1, 2, (0, 0, 1), paces=((3.0, 1.0),)),
    ClaimCase(2, 2, (0,)),
    ClaimCase(1, 2, (0, 0, 1), is_even=True),
]
MORE_ABORTED = [
    ClaimCase(2, 2, (0, 1, 1), is_even=True),
    ClaimCase(1, 2, (0, 0, 0, 1), limit=2, depth=2),
    *SPLIT,
    ClaimCase(2, 2, (0, 1)),
    ClaimCase(2, 2, (0,), chunks=2, layout="v"),
    ClaimCase(2, 2, (0, 1), limit=2, paces=((4.0, 1.0), (1.0, 4.0))),
    ClaimCase(2, 2, (0, 0), limit=2, depth=2),
]


@pytest.mark.parametrize("case", marked(ABORTED, MORE_ABORTED), ids=str)
def test_whenever_a_rank_fails_the_others_refuse_nothing_until_they_hear_and_then_do_nothing(case: ClaimCase) -> None:
    found = ClaimSearch(case, aborts=True).run()
    assert not found.wrong
    assert found.ends
    assert found.peak_held <= case.limit * case.chunks


# What is broken.


@pytest.mark.parametrize(
    ("break_it", "objection"),
    [
        (broken.goes_on_when_aborted, "wants to run"),
        (broken.goes_on_when_aborted, "gives Offer"),
        (broken.answers_when_aborted, "gives Send"),
        (broken.refuses_when_aborted, "refuses Claimed"),
    ],
)
def test_a_core_that_does_not_stop_is_found(
    monkeypatch: pytest.MonkeyPatch, break_it: Callable[[pytest.MonkeyPatch], None], objection: str
) -> None:
    break_it(monkeypatch)
    wrong = ClaimSearch(ClaimCase(2, 2, (0,)), aborts=True).run().wrong
    assert any(objection in text and "after it was aborted" in text for text in wrong), wrong


@pytest.mark.parametrize("reduce", [True, False])
@pytest.mark.parametrize(
    ("break_it", "case", "objection"),
    [
        (broken.gives_twice, ClaimCase(1, 2, (0, 0)), "was granted twice"),
        (broken.gives_twice, ClaimCase(2, 2, (0,)), "was granted twice"),
        (broken.skips_the_limit, ClaimCase(1, 2, (0, 0), depth=2), "holds and claims 2, the limit is 1"),
        (
            broken.counts_no_claims,
            ClaimCase(1, 2, (0, 0, 0), limit=2),
            "has claimed 3, the most allowed is 1 of a chunk",
        ),
        (broken.keeps_a_lost_claim, ClaimCase(1, 2, (0, 0, 1)), "has not ended the step"),
        (broken.helps_nobody, ClaimCase(2, 2, (0, 0), paces=((4.0, 1.0),) * 2), "has not ended the step"),
        (broken.tells_nobody, ClaimCase(1, 2, (0, 0)), "has not ended the step"),
        (broken.leaves_gradients_in_its_replica, ClaimCase(2, 2, (0,)), "refuses Arrived"),
    ],
)
def test_a_broken_rule_is_found(
    monkeypatch: pytest.MonkeyPatch,
    break_it: Callable[[pytest.MonkeyPatch], None],
    case: ClaimCase,
    objection: str,
    *,
    reduce: bool,
) -> None:
    break_it(monkeypatch)
    wrong = ClaimSearch(case, reduce=reduce).run().wrong
    assert any(objection in text for text in wrong), wrong
