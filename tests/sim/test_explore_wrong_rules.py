"""The explorer finds the deadlock of every rule that is known to be wrong, and the shortest way there."""

from __future__ import annotations

import pytest

from rrfp.lab.explore.cases import Backward, ChainCase, Grid, explored
from rrfp.model.tasks import Kind, Mode


def nearest(
    rule: str, in_order: Kind | None, stages: int, chunks: int, mode: Mode, backward: Backward
) -> tuple[str, str]:
    """Of the cases with up to three microbatches, K and M of one with the shortest trace to a deadlock, and that."""
    grid = Grid(
        (stages,), (1, 2, 3), (chunks,), ("looped",), (backward,), (mode,), (1, 2, 3), (rule,), (in_order,), ("all",)
    )
    stuck = [(len(found.trace), one.case, found) for one in explored(grid) for found in one.exploration.deadlocks[:1]]
    _, case, found = min(stuck, key=lambda entry: entry[0])
    return f"K={case.limit} M={case.microbatches}", " ".join(map(str, found.trace))


def is_clear(rule: str, in_order: Kind | None, chunks: int, backward: Backward = "whole") -> bool:
    grid = Grid(
        (1, 2, 3), (1, 2, 3), (chunks,), backwards=(backward,), modes=(Mode.TRAIN,), rules=(rule,), in_order=(in_order,)
    )
    return not any(one.exploration.deadlocks for one in explored(grid))


@pytest.mark.parametrize(
    ("stages", "mode", "trace"),
    [
        (1, Mode.TRAIN, "F0@0 F1@0"),
        (1, Mode.FORWARD, "F0@0 F1@0"),
        (2, Mode.TRAIN, "F0@0 F1@0 F0@1 F1@1"),
    ],
)
def test_draining_by_backwards_alone_deadlocks_with_two_chunks(stages: int, mode: Mode, trace: str) -> None:
    """That is D < K*C for every forward, no staircase: chunk 0 takes the slots that chunk 1 would free memory with."""
    assert nearest("backward-drain", None, stages, 2, mode, "whole") == ("K=1 M=2", trace)


def test_draining_by_backwards_alone_is_the_staircase_with_one_chunk() -> None:
    assert is_clear("backward-drain", None, 1)


@pytest.mark.parametrize(
    ("kind", "stages", "chunks", "trace"),
    [
        (Kind.B, 1, 1, "F1@0"),
        (Kind.B, 2, 1, "F1@0 F1@1"),
        (Kind.B, 1, 2, "F1@0 F1@1"),
        (Kind.W, 1, 1, "F1@0 B1@0"),
        (Kind.W, 2, 1, "F1@0 F1@1 B1@1 B1@0"),
        (Kind.W, 1, 2, "F1@0 F1@1 B1@1 B1@0"),
    ],
)
def test_a_forced_order_deadlocks_without_the_reserve_rule(kind: Kind, stages: int, chunks: int, trace: str) -> None:
    backward: Backward = "split" if kind is Kind.W else "whole"
    assert nearest("unreserved", kind, stages, chunks, Mode.TRAIN, backward) == ("K=1 M=2", trace)


def test_no_order_needs_no_reserve_rule() -> None:
    assert is_clear("unreserved", None, 2)


def test_the_last_slot_alone_is_too_small_a_reserve_for_two_chunks() -> None:
    """K = 1: microbatch 1 starts at D = 0 < K*C - 1, and 0 needs D < K*C - 1 as well."""
    assert nearest("last-slot", Kind.B, 1, 2, Mode.TRAIN, "whole") == ("K=1 M=2", "F1@0")


def test_one_slot_on_each_step_of_the_staircase_is_too_small_a_reserve_for_two_chunks() -> None:
    """K = 2: chunk 1 of microbatch 1 takes the third of four slots; chunk 0 of microbatch 0 may not have the last."""
    assert nearest("step-slot", Kind.B, 1, 2, Mode.TRAIN, "whole") == ("K=2 M=3", "F1@0 F2@0 F1@1")


@pytest.mark.parametrize("rule", ["last-slot", "step-slot"])
def test_one_reserved_slot_is_enough_for_one_chunk(rule: str) -> None:
    assert is_clear(rule, Kind.B, 1)
    assert is_clear(rule, Kind.W, 1, "split")


@pytest.mark.parametrize("limit", [2, 3, 4])
def test_a_reserve_that_is_too_small_deadlocks_at_any_limit_below_m(limit: int) -> None:
    case = ChainCase(1, limit + 1, 2, limit=limit, rule="step-slot", in_order=Kind.B)
    assert case.explore().deadlocks
