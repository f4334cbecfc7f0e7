"""Random kills and stops with ``on_lost_rank="finish"``: no hang, no other gradients, no lost step.

Two kills here, 30 and 24 stops in the long form.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from fork_server import fork_server  # noqa: F401 - a fixture
from runtime.random_finishes import Kill, Outcome, draw, draw_stops, report, run

SEED = 41


@pytest.mark.slow
@pytest.mark.parametrize("kill", draw(SEED, 2), ids=lambda kill: f"rank {kill.victim} of 2 x {kill.replicas}")
def test_the_others_finish_and_save_or_name_the_lost_rank(kill: Kill, tmp_path: Path) -> None:
    run(kill, tmp_path / "ranks")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kills", [draw(SEED + 1, 30), draw_stops(SEED + 2, 24)], ids=["kills", "stops"])
def test_many(kills: list[Kill], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcomes: list[Outcome] = []
    for number, kill in enumerate(kills):
        try:
            outcomes.append(run(kill, tmp_path / str(number)))
        except AssertionError as error:
            raise AssertionError(f"number {number}, {kill}: {error}") from error
    with capsys.disabled():
        print(f"\n{report(outcomes)}")  # noqa: T201 - it is what this test is run for
