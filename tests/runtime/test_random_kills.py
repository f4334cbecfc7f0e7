"""Kills and stops at random moments: no hang, no wrong name. A few here, 100 in the long version."""

from __future__ import annotations

from pathlib import Path

import pytest
from batches import long
from fork_server import fork_server  # noqa: F401 - a fixture
from runtime.random_kills import Kill, Outcome, draw, report, run
from runtime.test_processes import TRANSPORTS
from transports.curved import curve

from rrfp.transports.registry import TransportSpec

SEED = 31


def kills(seed: int, count: int, quick: int) -> pytest.MarkDecorator:
    """The decorator for so many random kills, of which all but ``quick`` are long."""
    drawn = draw(seed, count)
    names = [f"{kill.how.name} of {kill.victim} in {kill.mesh}" for kill in drawn]
    return pytest.mark.parametrize("kill", [*drawn[:quick], *map(long, drawn[quick:])], ids=names)


@pytest.mark.parametrize("transport", TRANSPORTS)
@kills(SEED, 6, quick=5)
def test_a_rank_that_is_killed_or_stopped_is_named_by_all_others(kill: Kill, transport: str, tmp_path: Path) -> None:
    run(kill, tmp_path / "ranks", transport)


@kills(SEED + 2, 2, quick=1)
def test_it_is_named_over_encrypted_connections(kill: Kill, tmp_path: Path) -> None:
    run(kill, tmp_path / "ranks", curve)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("transport", ["auto", "zmq", curve])
def test_a_hundred_random_kills_and_stops(
    transport: TransportSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes: list[Outcome] = []
    for number, kill in enumerate(draw(SEED + 1, 100)):
        try:
            outcomes.append(run(kill, tmp_path / str(number), transport))
        except AssertionError as error:
            raise AssertionError(f"kill {number} of seed {SEED + 1}, {kill}: {error}") from error
    with capsys.disabled():
        print(f"\n{report(outcomes)}")  # noqa: T201 - it is what this test is run for
