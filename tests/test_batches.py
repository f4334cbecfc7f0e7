"""What is left to the long test run is what the marks say."""

from __future__ import annotations

import pytest


@pytest.mark.every_other
@pytest.mark.parametrize("third", range(2))
@pytest.mark.parametrize(("second", "_"), [(number, None) for number in range(3)])
@pytest.mark.parametrize("first", range(4))
def test_every_other_combination_is_long(
    first: int, second: int, third: int, _: None, request: pytest.FixtureRequest
) -> None:
    is_long = request.node.get_closest_marker("long") is not None
    assert is_long == bool((first + second + third) % 2)
