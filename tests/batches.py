"""How much of an exhaustive test each test run does: the first part in every one, all of it in the long one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings

#: The profile of hypothesis under which property tests try all their examples; `make test-long` chooses it.
FULL = "full"


def batches(seeds: int, size: int, quick: int) -> list[object]:
    """Parameters of a test: the first seed of each batch of ``size``; those from ``quick`` on are marked long."""
    return [pytest.param(first, marks=pytest.mark.long if first >= quick else ()) for first in range(0, seeds, size)]


def long(*values: Any) -> Any:
    """Parameters of a test that are for the long test run alone."""
    return pytest.param(*values, marks=pytest.mark.long)


def examples(most: int) -> settings:
    """Settings of a property test: ``most`` examples in the long test run, an eighth of them in every one."""
    share = 1 if settings.get_current_profile_name() == FULL else 8
    return settings(max_examples=max(10, most // share), deadline=None)
