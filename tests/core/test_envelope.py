"""The curve by which a limit on bytes expects: above all that was seen, and no higher than concavity asks."""

from __future__ import annotations

import math
from itertools import product

import pytest
from batches import examples
from hypothesis import given
from hypothesis import strategies as st

from rrfp.memory.seen_sizes import ConcaveEnvelope, Point

points: st.SearchStrategy[list[tuple[int, int]]] = st.lists(
    st.tuples(st.integers(1, 12), st.integers(0, 12)), min_size=1, max_size=9
)


def envelope(*seen: Point) -> ConcaveEnvelope:
    curve = ConcaveEnvelope()
    for point in seen:
        curve.add(*point)
    return curve


def least(seen: list[tuple[int, int]], number: int) -> float:
    """By definition, at up to the largest number: the highest that a point, or a line between two, makes necessary."""
    seen = [(0, 0), *seen]
    lines = [y + (number - x) / (x2 - x) * (y2 - y) for (x, y), (x2, y2) in product(seen, repeat=2) if x < number <= x2]
    return max([*lines, *(y for x, y in seen if x <= number)])


@examples(400)
@given(points, st.integers(0, 9))
def test_it_is_the_least_concave_curve_above_all_points_in_any_order_and_any_parts(
    seen: list[tuple[int, int]], cut: int
) -> None:
    curve = envelope(*seen[:cut])
    curve.cover(envelope(*seen[cut:]))
    largest = max(number for number, _ in seen)
    for number in range(1, largest + 1):
        assert curve.at(number) == pytest.approx(least(seen, number))
    assert bool(curve) == any(num_bytes for _, num_bytes in seen)


@given(points)
def test_beyond_the_largest_number_it_rises_in_proportion(seen: list[tuple[int, int]]) -> None:
    curve, largest = envelope(*seen), max(number for number, _ in seen)
    assert curve.at(3 * largest) == pytest.approx(3 * max(num_bytes for _, num_bytes in seen))


def test_bytes_in_proportion_are_met_exactly() -> None:
    curve = envelope(*((number, 7 * number) for number in (3, 1009, 7919)))
    assert [curve.at(number) for number in (1, 1000, 7919, 15838)] == [7, 7000, 7 * 7919, 14 * 7919]


def test_without_points_nothing_is_expected() -> None:
    assert not ConcaveEnvelope()
    assert ConcaveEnvelope().at(5) == 0


def test_numbers_may_differ_by_any_magnitude() -> None:
    curve = envelope((5e-324, 2.0), (1e308, 4.0))
    assert (curve.at(5e-324), curve.at(1e308)) == (2.0, 4.0)
    assert 2 <= curve.at(1.0) <= 4
    assert envelope((5e-324, 2.0)).at(1e308) == math.inf
