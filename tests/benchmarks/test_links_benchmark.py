"""The benchmark of slow links compares what it says it compares."""

from __future__ import annotations

import pytest

from benchmarks.links.simulated import LINKS, cells, kinds


def test_within_auto_a_whole_backward_reaches_the_bound_and_a_split_one_pays_one_round_trip() -> None:
    found = {(cell.links, cell.delay, cell.method): cell for cell in cells()}
    whole, split = (found["none", 0, f"{backward}, auto"] for backward in ("whole", "split"))
    for (links, delay, method), cell in found.items():
        if links not in LINKS or not method.endswith("auto"):
            continue
        base = whole if method.startswith("whole") else split
        assert cell.milliseconds == pytest.approx(base.milliseconds + 2 * delay * len(LINKS[links]))
        assert cell.held <= 1.5 * 8 * 8


def test_every_kind_of_pipeline_is_run_within_every_limit() -> None:
    rows = [(row.pipelines, row.limit) for row in kinds(1)]
    assert len(rows) == len(set(rows)) == 5 * 4
