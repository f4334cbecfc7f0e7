"""The ledger of held bytes: this rank's sum and its peak, and the sum of the worst rank for each holder."""

from __future__ import annotations

from core_script import T

from rrfp.memory.held_bytes import HeldBytes

FIRST, SECOND = (0, 0), (0, 1)


def test_a_rank_alone_sums_its_holders_and_keeps_the_peak() -> None:
    ledger = HeldBytes()
    ledger.hold(FIRST, 10)
    ledger.hold(SECOND, 5)
    ledger.keep_output(T("F0@0"), 3)
    assert (ledger.own, ledger.worst, ledger.peak) == (18, 18, 18)
    ledger.hold(FIRST, 4)
    ledger.drop(T("F0@0"))
    assert (ledger.own, ledger.worst, ledger.peak) == (9, 9, 18)
    ledger.drop(FIRST)
    ledger.drop(FIRST)
    assert (ledger.own, ledger.worst, ledger.of(SECOND, 0)) == (5, 5, 5)


def test_for_each_holder_the_worst_rank_counts_and_only_this_rank_is_reported() -> None:
    ledger = HeldBytes(3)
    ledger.hold(FIRST, 10)
    ledger.hold(FIRST, 14, member=2)
    ledger.hold(SECOND, 7, member=1)
    assert (ledger.own, ledger.worst, ledger.peak) == (10, 21, 10)
    assert (ledger.worst_of(FIRST), ledger.of(FIRST, 1), ledger.worst_of((1, 0))) == (14, 0, 0)
    ledger.hold(FIRST, 0)
    assert (ledger.own, ledger.worst) == (0, 21)
    ledger.drop(FIRST)
    assert (ledger.own, ledger.worst) == (0, 7)


def test_outputs_of_followers_count_while_this_rank_keeps_its_own() -> None:
    ledger = HeldBytes(2)
    ledger.keep_output_elsewhere(T("F0@0"), 9, member=1)
    assert ledger.worst == 0
    ledger.keep_output(T("F0@0"), 0)
    assert (ledger.own, ledger.worst) == (0, 9)
    ledger.keep_output_elsewhere(T("F0@0"), 11, member=1)
    assert ledger.worst == 11
    ledger.drop(T("F0@0"))
    ledger.keep_output_elsewhere(T("F0@0"), 11, member=1)
    assert (ledger.own, ledger.worst) == (0, 0)
