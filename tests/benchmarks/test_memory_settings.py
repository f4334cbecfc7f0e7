"""The memory benchmark with ragged microbatches: their rows, and the limit on their own bytes."""

from __future__ import annotations

import pytest

from benchmarks.memory.settings import OWN_BYTES, Method, Settings
from rrfp.memory.admission import Limit


def test_ragged_microbatches_have_rows_in_proportion_to_their_sizes_and_the_same_in_the_mean() -> None:
    settings = Settings(rows=10_000, ragged=True)

    rows, sizes = settings.rows_of(1), settings.sizes(1)

    assert sizes is not None
    assert sum(rows) == pytest.approx(10_000 * settings.microbatches, rel=1e-3)
    assert [count / rows[0] for count in rows] == pytest.approx([size / sizes[0] for size in sizes], rel=1e-3)
    assert max(rows) > 1.5 * min(rows)
    assert rows != settings.rows_of(2)


def test_equal_microbatches_have_equal_rows_and_no_sizes() -> None:
    settings = Settings(rows=100, microbatches=3)

    assert settings.rows_of(0) == [100, 100, 100]
    assert settings.sizes(0) is None


def test_only_ragged_microbatches_are_limited_to_their_own_bytes() -> None:
    limits = {ragged: {method.limit for method in Settings(ragged=ragged).methods} for ragged in (False, True)}

    assert limits[True] - limits[False] == {OWN_BYTES}
    assert Method("bfw", OWN_BYTES, split=True).options(77)["limit"] == Limit(bytes=77)
