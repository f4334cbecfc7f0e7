"""What memory rules say of themselves: their bound, and what is wrong with slots that are held so."""

from __future__ import annotations

import pytest

from rrfp.memory.admission import DEFAULT_RULE, OFFERED_RULES, RULES
from rrfp.memory.rules import SlotCounts

#: Two chunks, four microbatches.
VISITORS = [range(4), range(4)]


def counts(*holders: tuple[int, int]) -> SlotCounts:
    """The forwards (chunk, microbatch) were started, and none has given its slot back."""
    counts = SlotCounts(VISITORS)
    for chunk, microbatch in holders:
        counts.take(chunk, microbatch)
    return counts


def test_each_rule_has_a_name_and_a_statement_and_two_may_be_asked_for() -> None:
    assert list(RULES) == ["staircase", "paper", "reserve", "banker"]
    assert OFFERED_RULES == ("staircase", "paper")
    assert DEFAULT_RULE == "staircase"
    assert len({rule.text for rule in RULES.values()}) == len(RULES)


@pytest.mark.parametrize(("rule", "most"), [("staircase", 4), ("reserve", 4), ("banker", 4), ("paper", 6)])
def test_d_is_bounded_by_the_slots_and_under_the_papers_rule_by_a_forward_of_each_chunk_more(
    rule: str, most: int
) -> None:
    assert RULES[rule].bound(4, 2) == most


@pytest.mark.parametrize("rule", ["staircase", "reserve"])
def test_the_shallow_chunk_leaves_a_slot_to_the_deep_one(rule: str) -> None:
    assert RULES[rule].validate(4, counts((0, 0), (0, 1), (0, 2), (1, 0))) is None
    assert RULES[rule].validate(4, counts((0, 0), (0, 1), (0, 2), (0, 3))) == (
        "holds 4 chunk tasks up to chunk 0, the most allowed is 3"
    )


def test_the_banker_keeps_room_for_the_rest_of_each_lower_microbatch() -> None:
    assert RULES["banker"].validate(4, counts((0, 0), (0, 1), (1, 1))) is None
    wrong = RULES["banker"].validate(4, counts((0, 0), (0, 1), (1, 1), (0, 2)))
    assert wrong == "leaves microbatch 0 no room: 4 held from it on and 1 to start, of 4"


def test_slots_given_back_are_not_held() -> None:
    held = counts((0, 0), (0, 1), (0, 2), (0, 3))
    held.give_back(0, 0)
    assert held.held == 3
    assert RULES["staircase"].validate(4, held) is None


@pytest.mark.parametrize("rule", RULES)
def test_no_rule_allows_more_than_its_bound(rule: str) -> None:
    all_of_them = [(chunk, microbatch) for chunk in range(2) for microbatch in range(4)]
    assert RULES[rule].validate(4, counts(*all_of_them)) == (
        f"holds 8 chunk tasks, the most allowed is {RULES[rule].bound(4, 2)}"
    )
