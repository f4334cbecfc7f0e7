"""The benchmark of slow links compares what it says it compares."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from installed import ROOT

from benchmarks.links import trace
from benchmarks.links.simulated import CLAIMED, LINKS, cells, kinds


def test_within_auto_a_whole_backward_reaches_the_bound_and_a_split_one_pays_one_round_trip() -> None:
    found = {(cell.links, cell.delay, cell.method): cell for cell in cells()}
    whole, split = (found["none", 0, f"{backward}, auto"] for backward in ("whole", "split"))
    for (links, delay, method), cell in found.items():
        if links not in LINKS or not method.endswith("auto") or method == CLAIMED:
            continue
        base = whole if method.startswith("whole") else split
        assert cell.milliseconds == pytest.approx(base.milliseconds + 2 * delay * len(LINKS[links]))
        assert cell.held <= 1.5 * 8 * 8


def test_with_claims_a_step_takes_one_round_trip_of_each_slow_link_more() -> None:
    found = {(cell.links, cell.delay): cell for cell in cells() if cell.method == CLAIMED}
    for (links, delay), cell in found.items():
        expected = found["none", 0].milliseconds + 4 * delay * len(LINKS.get(links, ()))
        assert cell.milliseconds == pytest.approx(expected)


def test_every_kind_of_pipeline_is_run_within_every_limit() -> None:
    rows = [(row.pipelines, row.limit) for row in kinds(1)]
    assert len(rows) == len(set(rows)) == 5 * 4


def test_in_pipemorphs_trace_auto_gains_at_least_what_pipemorph_did() -> None:
    plays = list(trace.simulated(("1F1B", "whole, auto", "split, auto")))
    (aim,) = trace.aims_of(plays, "1F1B", "split, auto")
    assert aim.is_met, aim
    most = 36 + 3 * 6 * 8  # three slow links of up to three periods each, on every stage
    assert all(36 <= play.held <= most for play in plays)


def test_a_step_of_the_trace_has_the_links_that_are_slow_in_its_iterations() -> None:
    assert trace.slow_in(14, 1) == ((), 0.0)
    links, milliseconds = trace.slow_in(15, 1)
    assert links == (2,)
    assert milliseconds == pytest.approx(30 * 25 / (1440 / 31))
    assert trace.slow_in(85, 1) == ((), 0.0)
    slow = [step for step in range(1, 104) if trace.slow_in(step, 10)[0]]
    assert len(slow) == 9 * 7


@pytest.mark.long
@pytest.mark.timeout(180)
def test_processes_are_measured_with_every_method_beside_the_simulation() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "links" / "run.py"), "--quick", "--json"]
    methods = ["--methods", "torch 1F1B", "n", "auto"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *methods], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    document = json.loads(done.stdout)
    rows = {(row["links"], row["delay"], row["method"]): row for row in document["rows"]}
    assert set(rows) == {(*cell, method) for cell in (("none", 0), ("0-1", 60)) for method in methods[1:]}
    for (links, _, method), row in rows.items():
        assert (row["simulated"] is None) == (method == "torch 1F1B")
        assert row["milliseconds"] >= (row["simulated"] or 0.0)
        if links == "0-1" and method == "n":  # two microbatches a round trip, of six
            assert row["milliseconds"] > rows["none", 0, "n"]["milliseconds"] + 2 * 2 * 60
    assert rows["0-1", 60, "auto"]["held"] > rows["none", 0, "auto"]["held"]
