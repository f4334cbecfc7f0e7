"""How much memory each rule lets a stage hold: the bounds of docs/memory-rules.md, and where they are reached."""

from __future__ import annotations

import pytest

from rrfp.lab.explore.cases import Bounds, ChainCase, Explored, bounds_of, explored
from rrfp.model.placement import Layout, Placement
from rrfp.model.tasks import Mode


def only(case: ChainCase) -> Explored[ChainCase]:
    (one,) = explored([case])
    return one


def test_bounds_of_one_chunk_a_stage() -> None:
    """1F1B's limits on three stages. What a stage receives, the one before it holds."""
    bounds = bounds_of(Placement(3), [3, 2, 1], Mode.TRAIN, "staircase")
    assert bounds == Bounds(held=(3, 2, 1), received=(3, 3, 2), buffered=(0, 3, 2))
    assert bounds == bounds_of(Placement(3), [3, 2, 1], Mode.TRAIN, "paper")


def test_bounds_of_two_chunks_differ_by_rule_and_layout() -> None:
    looped, folded = Placement(3, 2), Placement(3, 2, "v")
    assert bounds_of(looped, [2] * 3, Mode.TRAIN, "staircase") == Bounds((4, 4, 4), (3, 3, 3), (4, 4, 4))
    assert bounds_of(folded, [2] * 3, Mode.TRAIN, "staircase") == Bounds((4, 4, 4), (3, 3, 3), (4, 8, 4))
    assert bounds_of(looped, [2] * 3, Mode.TRAIN, "paper") == Bounds((6, 6, 6), (5, 5, 5), (6, 6, 6))


@pytest.mark.parametrize("rule", ["staircase", "paper"])
def test_forward_only_a_received_input_holds_a_slot_of_its_sender(rule: str) -> None:
    bounds = bounds_of(Placement(3, 2), [2] * 3, Mode.FORWARD, rule)
    assert bounds == Bounds((4, 4, 4), (4, 4, 4), (4, 4, 4))


@pytest.mark.parametrize("limit", [1, 2])
def test_the_staircase_reaches_its_limit_and_never_passes_it(limit: int) -> None:
    one = only(ChainCase(3, limit + 2, 2, limit=limit))
    assert one.is_safe
    assert one.exploration.peak_held == (2 * limit,) * 3
    assert one.exploration.peak_received == (2 * limit - 1,) * 3


@pytest.mark.parametrize("layout", ["looped", "v"])
def test_the_papers_rule_passes_its_limit_by_the_number_of_chunks(layout: Layout) -> None:
    one = only(ChainCase(3, 4, 2, layout, limit=1, rule="paper"))
    assert one.is_safe
    assert one.exploration.peak_held == (4, 4, 4)
    assert one.exploration.peak_received == (3, 3, 3)


def buffered(case: ChainCase) -> tuple[int, ...]:
    one = only(case)
    assert one.is_safe
    return one.exploration.peak_buffered


def test_the_papers_bound_on_buffers_holds_for_the_looped_layout() -> None:
    """Corollary C.2: at most limit + C entries, here 2 + 2, kept until their backward has run."""
    assert buffered(ChainCase(3, 4, 2, "looped", limit=1, rule="paper")) == (3, 4, 4)


def test_the_papers_bound_on_buffers_fails_for_the_v_layout() -> None:
    """An inner stage of a V is fed from both sides; three microbatches on three stages are enough."""
    assert buffered(ChainCase(3, 3, 2, "v", limit=1, rule="paper")) == (2, 5, 3)


@pytest.mark.parametrize(("limit", "microbatches"), [(1, 2), (2, 3), (3, 5)])
def test_the_staircase_buffers_up_to_3k_minus_1_inputs_on_an_inner_stage_of_a_v(limit: int, microbatches: int) -> None:
    """So the paper's bound, K*C + C, fails from K = 4 on, where it takes 7 microbatches."""
    assert buffered(ChainCase(3, microbatches, 2, "v", limit=limit))[1] == 3 * limit - 1


@pytest.mark.slow
@pytest.mark.long
def test_the_staircase_passes_the_papers_bound_on_buffers_at_limit_4() -> None:
    assert buffered(ChainCase(3, 7, 2, "v", limit=4))[1] == 11


def test_a_bound_that_is_passed_is_told() -> None:
    safe = only(ChainCase(2, 2, 2, limit=1))
    beyond = Explored(ChainCase(2, 2, 1, limit=1), safe.exploration, 0.0)
    assert safe.broken == ()
    assert beyond.broken[0] == "D reached 2 on stage 0, bound 1"
    assert not beyond.is_safe
