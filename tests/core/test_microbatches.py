"""`rrfp.microbatches`: every sample once, within the budget, as few and as even as they get."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from batches import examples
from hypothesis import given
from hypothesis import strategies as st

from rrfp import ConfigError, Microbatches, microbatches

COSTS = st.lists(st.integers(1, 30), min_size=1, max_size=7)


def formed(costs: Sequence[float], **how: Any) -> Microbatches[int]:
    """Microbatches of the indices of ``costs``; a sample's weight is ten times its cost."""
    return microbatches(range(len(costs)), cost=costs.__getitem__, weight=lambda index: 10 * costs[index], **how)


def size(group: Sequence[int], costs: Sequence[int], padded: bool) -> int:
    own = [costs[index] for index in group]
    return max(own) * len(own) if padded else sum(own)


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """All ways to put ``items`` into groups."""
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        yield [[items[0]], *rest]
        for place, group in enumerate(rest):
            yield [*rest[:place], [items[0], *group], *rest[place + 1 :]]


@given(COSTS, st.integers(30, 90), st.booleans())
@examples(200)
def test_every_sample_is_in_one_microbatch_within_the_budget(costs: list[int], budget: int, padded: bool) -> None:
    parts = formed(costs, budget=budget, padded=padded)
    assert sorted(index for part in parts for index in part) == list(range(len(costs)))
    assert parts.sizes == tuple(size(part, costs, padded) for part in parts)
    assert max(parts.sizes) <= budget
    assert parts.weights == tuple(10 * sum(costs[index] for index in part) for part in parts)
    assert [part[0] for part in parts] == sorted(part[0] for part in parts)
    assert all(part == sorted(part) for part in parts)


@given(COSTS, st.integers(30, 90), st.booleans())
@examples(60)
def test_there_are_as_few_as_the_budget_allows(costs: list[int], budget: int, padded: bool) -> None:
    """Padded ones exactly; packed ones to the bound of best fit, which these few samples reach."""
    fitting = [
        len(groups)
        for groups in partitions(list(range(len(costs))))
        if all(size(group, costs, padded) <= budget for group in groups)
    ]
    found = len(formed(costs, budget=budget, padded=padded))
    assert found == min(fitting) if padded else found <= min(fitting) * 11 / 9 + 1


@given(COSTS, st.integers(1, 4), st.booleans())
@examples(60)
def test_a_number_of_them_is_as_even_as_multifit_promises(costs: list[int], count: int, padded: bool) -> None:
    count = min(count, len(costs))
    parts = formed(costs, count=count, padded=padded)
    assert len(parts) == count
    best = min(
        max(size(group, costs, padded) for group in groups)
        for groups in partitions(list(range(len(costs))))
        if len(groups) == count
    )
    assert max(parts.sizes) <= best * (1 if padded else 13 / 11) * 1.02


def test_ranks_that_know_equal_costs_form_the_same() -> None:
    costs = [7, 3, 7, 3, 1, 1, 12, 5, 5, 2]
    assert formed(costs, budget=16) == formed(tuple(map(float, costs)), budget=16.0)
    assert list(formed(costs, budget=16).sizes) == [16, 16, 14]


def test_few_microbatches_are_evened_out_below_the_budget() -> None:
    assert formed([6, 6, 6, 6], budget=18).sizes == (12, 12)
    assert formed([4] * 6, budget=20, padded=True).sizes == (12, 12)


@pytest.mark.parametrize(
    ("costs", "how", "error"),
    [
        ([], {"budget": 4}, "samples is empty"),
        ([1, 2], {}, "budget and count are both None"),
        ([1, 5, 2], {"budget": 4}, "budget is 4, must be at least the cost of sample 1: 5"),
        ([1, 2], {"budget": 0}, "budget is 0, must be a finite number above 0, or None"),
        ([1, 2], {"count": 3}, r"count is 3, must be a whole number 1\.\.2, or None"),
        ([1, 2], {"count": 0}, "count is 0"),
        ([3, 3, 3], {"count": 1, "budget": 5}, "count is 1, must be larger: .* budget of 5, the largest costs 9"),
        ([1, 0], {"budget": 4}, "cost of sample 1 is 0, must be a finite number above 0"),
        ([1, float("nan")], {"budget": 4}, "cost of sample 1 is nan"),
    ],
)
def test_what_cannot_be_formed_is_one_error(costs: list[float], how: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        formed(costs, **how)


@pytest.mark.parametrize("convert", [np.int64, np.float32, torch.tensor])
def test_costs_and_weights_are_numbers_of_any_library(convert: Callable[[int], Any]) -> None:
    parts = formed([convert(cost) for cost in (3, 5, 2)], budget=convert(5), count=2)
    assert (list(parts), parts.sizes, parts.weights) == ([[0, 2], [1]], (5, 5), (50, 50))


def test_a_weight_is_a_number_that_is_not_negative() -> None:
    with pytest.raises(ConfigError, match="weight of sample 1 is -1, must be a finite number >= 0"):
        microbatches([1, -1], cost=abs, weight=lambda sample: sample, budget=4)
    with pytest.raises(ConfigError, match="weight is 1, must be a function of a sample"):
        microbatches([1], cost=abs, weight=1, budget=4)  # type: ignore[arg-type]


@pytest.mark.parametrize("samples", [3, None, iter([1]), {1}, {"a": 1}])
def test_what_is_no_sequence_of_samples_is_refused(samples: Any) -> None:
    with pytest.raises(ConfigError, match=r"^samples is .*, must be a list, or another sequence$"):
        microbatches(samples, cost=len, weight=len, count=1)
    with pytest.raises(ConfigError, match="padded is 'yes', must be True or False"):
        formed([1, 2], count=1, padded="yes")
