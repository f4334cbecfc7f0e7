"""How many microbatches each replica runs, and which ones."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp.runtime.steps.deal import WORTH, Deal, Home, Pace, dealt

EQUAL = Pace(1.0, 3.0)
counts = st.lists(st.integers(1, 5), min_size=1, max_size=3)
paces = st.builds(Pace, st.floats(0.0, 10.0), st.floats(0.0, 10.0))


def slowest(shares: Sequence[int], own: Sequence[Pace]) -> float:
    return max(pace.seconds(count) for pace, count in zip(own, shares, strict=True))


@pytest.mark.parametrize(
    ("given_", "own", "wanted"),
    [
        ([8, 8], [EQUAL, EQUAL], (8, 8)),
        ([8, 8], [EQUAL, Pace(1.05, 3.0)], (8, 8)),  # moving one gains less than it may cost
        ([8, 8], [EQUAL, Pace(2.0, 3.0)], (11, 5)),
        ([8, 8, 8, 8], [EQUAL, EQUAL, Pace(4.0, 3.0), EQUAL], (10, 10, 2, 10)),
        ([2, 8], [EQUAL, EQUAL], (5, 5)),
        ([1, 1], [EQUAL, Pace(9.0, 3.0)], (1, 1)),  # each runs one at least
        ([4], [EQUAL], (4,)),
    ],
)
def test_a_slow_replica_runs_fewer(given_: list[int], own: list[Pace], wanted: tuple[int, ...]) -> None:
    assert dealt(given_, own) == wanted


@given(counts.flatmap(lambda own: st.tuples(st.just(own), st.lists(paces, min_size=len(own), max_size=len(own)))))
def test_no_other_deal_is_shorter_by_more_than_what_is_not_worth_it(case: tuple[list[int], list[Pace]]) -> None:
    given_, own = case
    found = dealt(given_, own)
    assert sum(found) == sum(given_)
    assert min(found) >= 1
    every = itertools.product(range(1, sum(given_) + 1), repeat=len(given_))
    best = min(slowest(shares, own) for shares in every if sum(shares) == sum(given_))
    if found == tuple(given_):
        assert best >= (1 - WORTH) * slowest(given_, own) * (1 - 1e-9)
    else:
        assert slowest(found, own) <= best * (1 + 1e-9)


@given(counts, st.randoms(use_true_random=False))
def test_each_microbatch_has_one_place_and_most_stay_at_home(given_: list[int], random: object) -> None:
    shuffled = sorted(given_, key=lambda _: random.random())  # type: ignore[attr-defined]
    deal = Deal(tuple(given_), tuple(shuffled))
    assert [len(homes) for homes in deal.homes] == shuffled
    assert sorted(home for homes in deal.homes for home in homes) == [
        Home(r, m) for r, count in enumerate(given_) for m in range(count)
    ]
    for r, homes in enumerate(deal.homes):
        assert homes[: min(given_[r], shuffled[r])] == tuple(Home(r, m) for m in range(min(given_[r], shuffled[r])))
        assert [deal.homes[replica][m] for replica, m in deal.places(r)] == [Home(r, m) for m in range(given_[r])]
