"""Which microbatches each replica runs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp.runtime.steps.deal import WORTH, Deal, Home, ReplicaPace, dealt

EQUAL = ReplicaPace(1.0, 3.0)
paces = st.builds(ReplicaPace, st.floats(0.0, 10.0), st.floats(0.0, 10.0))
own_sizes = st.lists(st.integers(1, 9).map(float), min_size=1, max_size=6)
cases = st.integers(1, 4).flatmap(
    lambda n: st.tuples(st.lists(own_sizes, min_size=n, max_size=n), st.lists(paces, min_size=n, max_size=n))
)


def ones(counts: Sequence[int]) -> list[list[float]]:
    return [[1.0] * count for count in counts]


def slowest(shares: Sequence[float], own: Sequence[ReplicaPace], mean: float = 1.0) -> float:
    return max(pace.rest * mean + pace.each * share for pace, share in zip(own, shares, strict=True))


@pytest.mark.parametrize(
    ("counts", "own", "wanted"),
    [
        ([8, 8], [EQUAL, EQUAL], (8, 8)),
        ([8, 8], [EQUAL, ReplicaPace(1.05, 3.0)], (8, 8)),  # moving one gains less than it may cost
        ([8, 8], [EQUAL, ReplicaPace(2.0, 3.0)], (11, 5)),
        ([8, 8, 8, 8], [EQUAL, EQUAL, ReplicaPace(4.0, 3.0), EQUAL], (10, 10, 2, 10)),
        ([2, 8], [EQUAL, EQUAL], (5, 5)),
        ([1, 1], [EQUAL, ReplicaPace(9.0, 3.0)], (1, 1)),  # each runs one at least
        ([4], [EQUAL], (4,)),
    ],
)
def test_a_slow_replica_runs_fewer(counts: list[int], own: list[ReplicaPace], wanted: tuple[int, ...]) -> None:
    assert dealt(ones(counts), own).counts == wanted


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=3).flatmap(
        lambda counts: st.tuples(st.just(counts), st.lists(paces, min_size=len(counts), max_size=len(counts)))
    )
)
def test_of_equal_ones_no_deal_is_shorter_by_more_than_what_is_not_worth_it(
    case: tuple[list[int], list[ReplicaPace]],
) -> None:
    counts, own = case
    found = dealt(ones(counts), own)
    every = itertools.product(range(1, sum(counts) + 1), repeat=len(counts))
    best = min(slowest(shares, own) for shares in every if sum(shares) == sum(counts))
    if found.is_trivial:
        assert best >= (1 - WORTH) * slowest(counts, own) * (1 - 1e-9)
    else:
        assert slowest(found.counts, own) <= best * (1 + 1e-9)


@given(cases)
def test_each_microbatch_is_run_once_and_no_step_becomes_longer(
    case: tuple[list[list[float]], list[ReplicaPace]],
) -> None:
    sizes, own = case
    found = dealt(sizes, own)
    every = [Home(r, m) for r, each in enumerate(sizes) for m in range(len(each))]
    assert sorted(home for homes in found.homes for home in homes) == every
    assert min(found.counts) >= 1
    mean = sum(map(sum, sizes)) / len(every)
    shares = [sum(sizes[home.replica][home.microbatch] for home in homes) for homes in found.homes]
    before = slowest([*map(sum, sizes)], own, mean)
    assert found.is_trivial or slowest(shares, own, mean) <= (1 - WORTH) * before * (1 + 1e-9)


@given(cases)
def test_a_caller_finds_each_of_its_microbatches(case: tuple[list[list[float]], list[ReplicaPace]]) -> None:
    sizes, own = case
    deal = dealt(sizes, own)
    for r, each in enumerate(sizes):
        assert deal.given(r) == len(each)
        assert [deal.homes[replica][m] for replica, m in deal.places(r)] == [Home(r, m) for m in range(len(each))]
        is_own = [home.replica == r for home in deal.homes[r]]
        assert is_own == sorted(is_own, reverse=True)


def test_of_unequal_ones_those_move_that_balance_best() -> None:
    found = dealt([[6.0, 1.0, 6.0, 1.0], [1.0, 1.0, 2.0]], [ReplicaPace(1.0, 0.0), ReplicaPace(1.0, 0.0)])
    of_first, of_second = [Home(0, 0), Home(0, 1), Home(0, 3), Home(1, 1)], [Home(1, 0), Home(1, 2), Home(0, 2)]
    assert found.homes == (tuple(of_first), tuple(of_second))  # 9 each


def test_nobody_moves_alone() -> None:
    assert Deal.alone([2, 1]).homes == ((Home(0, 0), Home(0, 1)), (Home(1, 0),))
