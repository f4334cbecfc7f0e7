"""`CostTable`: what it refuses, where virtual stages live, and what its digest means."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from rrfp.costs import CostTable
from rrfp.errors import ConfigError
from rrfp.model.placement import Layout


def table(**changes: Any) -> CostTable:
    """2 stages x 1 chunk, 3 microbatches, split."""
    fields: dict[str, Any] = {
        "stages": 2,
        "chunks": 1,
        "placement": "looped",
        "microbatches": 3,
        "forward": [[1, 2, 3], [4, 5, 6]],
        "backward": [[2, 4, 6], [8, 10, 12]],
        "weight": [[0.5, 0.5, 0.5], [1, 1, 1]],
        "latency_forward": [[0.1, 0.2, 0.3]],
        "latency_backward": [[0.4, 0.5, 0.6]],
    }
    return CostTable(**(fields | changes))


def test_durations_by_kind() -> None:
    costs = table()
    assert costs.split
    assert [costs.duration(kind, 1, 2) for kind in ("F", "B", "W")] == [6.0, 12.0, 1.0]
    assert costs.work().tolist() == [6 + 12 + 1.5, 15 + 30 + 3]


def test_unsplit_merges_backward_and_keeps_the_rest() -> None:
    merged = table().to_unsplit()
    assert not merged.split
    assert merged.duration("B", 0, 1) == 4.5
    assert merged.to_unsplit() is merged
    assert np.array_equal(merged.work(), table().work())
    with pytest.raises(ConfigError, match="kind is 'W', must be one of: F, B"):
        merged.duration("W", 0, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": 0}, "stages is 0, must be a whole number >= 1"),
        ({"chunks": True}, "chunks is True, must be a whole number >= 1"),
        ({"microbatches": 3.0}, "microbatches is 3.0, must be a whole number >= 1"),
        ({"placement": "V"}, "placement is 'V', must be one of: looped, v"),
        ({"forward": [[1, 2, 3]]}, "F has 1 rows, must have 2 (stages x chunks)"),
        ({"backward": [[1, 2, 3], [1, 2]]}, "B[1] has 2 entries, must have 3 (one a microbatch)"),
        ({"weight": [[1, 2, 3], 7]}, "W[1] must be a list of 3 numbers (one a microbatch)"),
        ({"forward": 7}, "F must be a list of 2 rows (stages x chunks)"),
        ({"forward": np.float64(7)}, "F must be a list of 2 rows (stages x chunks)"),
        ({"forward": np.ones((2, 3, 1))}, "F must hold numbers only, 2 rows of 3"),
        ({"forward": [[1, 2, 3], [1, np.nan, 3]]}, "F[1][1] is nan, must be a finite number >= 0"),
        ({"weight": [[1, 2, 3], [1, 2, np.inf]]}, "W[1][2] is inf, must be a finite number >= 0"),
        ({"latency_backward": [[0, -1e-9, 0]]}, "latency_B[0][1] is -1e-09, must be a finite number >= 0"),
        (
            {"latency_forward": [[1, 2, 3]] * 2},
            "latency_F has 2 rows, must have 1 (one fewer than stages x chunks)",
        ),
    ],
)
def test_bad_fields_are_named_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        table(**changes)
    assert str(caught.value) == message


@pytest.mark.parametrize("rows", [[[1, 2, 3], [1, "x", 3]], [[1, 2, 3], [1, None, [3]]], [[1, 2, 3], [1, 2, 10**400]]])
def test_entries_that_are_no_numbers_are_refused(rows: Any) -> None:
    with pytest.raises(ConfigError, match=r"^F must hold finite numbers >= 0 only \(.*\)$"):
        table(forward=rows)


def test_the_table_is_a_read_only_copy() -> None:
    mine = np.ones((2, 3))
    costs = table(forward=mine)
    mine[0, 0] = 7
    assert costs.duration("F", 0, 0) == 1.0
    with pytest.raises(ValueError, match="read-only"):
        costs.forward[0, 0] = 7


def test_placements_follow_the_documented_formula() -> None:
    rows = np.ones((12, 1))
    layouts: tuple[Layout, ...] = ("looped", "v")
    for placement in layouts:
        costs = CostTable(4, 3, placement, 1, rows, rows, None, rows[:11], rows[:11])
        for r in range(3):
            for i in range(4):
                v = r * 4 + (3 - i if placement == "v" and r % 2 else i)
                assert costs.stage_of(v) == i
                assert costs.virtual_stages_of(i)[r] == v


def test_a_handover_on_one_stage_takes_no_time() -> None:
    rows = np.ones((4, 1))
    v_shape = CostTable(2, 2, "v", 1, rows, rows, None, rows[:3], 2 * rows[:3])
    forward, backward = v_shape.acting_latencies()
    assert forward.ravel().tolist() == [1, 0, 1]
    assert backward.ravel().tolist() == [2, 0, 2]
    alone = CostTable(1, 1, "looped", 1, rows[:1], rows[:1], None, np.empty((0, 1)), np.empty((0, 1)))
    assert alone.acting_latencies()[0].shape == (0, 1)


def test_digest_sees_every_field_and_nothing_else() -> None:
    same = table(forward=np.asfortranarray([[1, 2, 3], [4, 5, 6]], dtype=np.float32))
    assert same == table()
    assert hash(same) == hash(table())
    assert pickle.loads(pickle.dumps(same)) == same
    zero, minus_zero = table(latency_forward=[[0.0] * 3]), table(latency_forward=[[-0.0] * 3])
    assert zero == minus_zero
    rows = np.ones((2, 3))
    others = [
        zero,
        table(placement="v"),
        table(weight=None),
        table(forward=rows),
        table(backward=rows),
        table(weight=rows),
        table(latency_backward=rows[:1]),
        CostTable(1, 2, "looped", 3, table().forward, table().backward, rows, rows[:1], rows[:1]),
        CostTable(2, 1, "looped", 3, table().forward, table().backward, rows, rows[:1], rows[:1]),
    ]
    assert len({costs.digest() for costs in [table(), *others]}) == len(others) + 1
    assert table() != "something else"


def test_repr_shows_the_digest() -> None:
    digest = table().digest()
    assert len(digest) == 16
    shape = "stages=2, chunks=1, placement='looped', microbatches=3, split=True"
    assert repr(table()) == f"CostTable({shape}, digest={digest})"
