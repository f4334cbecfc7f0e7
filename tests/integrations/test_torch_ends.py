"""How a script with `ScheduleRRFP` ends: by itself, with a killed peer, with a peer that never calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from batches import long
from fork_server import TESTS, fork_server, run

__all__ = ["fork_server"]


def ends(how: str) -> tuple[list[int | None], list[dict[str, Any]]]:
    """The exit codes of two ranks, and what they report."""
    ended = run(TESTS / "integrations" / "torch_ends.py", how, ranks=2, timeout_s=40)
    return [each.code for each in ended], [json.loads(line) for each in ended for line in each.output.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["unclosed", "destroyed"])
def test_a_script_needs_no_close(how: str) -> None:
    """Whether the process group is destroyed before, or not at all."""
    codes, reports = ends(how)
    assert codes == [0, 0]
    assert len(reports) == 2


@pytest.mark.slow
def test_a_killed_peer_ends_the_step_with_a_named_error() -> None:
    codes, (survivor,) = ends("killed")
    assert codes == [7, -9]
    assert survivor["error"] == "ScheduleAborted"
    assert survivor["text"].startswith("aborted by stage 1: PeerLostError: ")
    assert survivor["frames"][-1] == "schedule.py", "of the runtime there is but the call that the script makes"
    assert survivor["frames"].count("schedule.py") == 1
    assert survivor["seconds"] < 6


@pytest.mark.slow
def test_a_stage_that_raises_while_shapes_are_inferred_is_named_on_the_rank_that_waits_for_it() -> None:
    """At once, while the process at fault is still there: torch's receives would wait for their own time limit."""
    codes, (waiting, culprit) = ends("raises")
    assert codes == [7, 7]
    assert (culprit["error"], culprit["text"]) == ("ValueError", "enough")
    assert (waiting["error"], waiting["text"]) == ("ScheduleAborted", "aborted by stage 1: ValueError: enough")
    assert waiting["seconds"] < 4


@pytest.mark.slow
@pytest.mark.parametrize("how", [long("refused"), "between"])
def test_an_error_outside_the_tasks_that_ends_a_rank_is_named_on_the_others(how: str) -> None:
    """Arguments that the first step refuses, and an error of the script between two steps."""
    codes, (survivor,) = ends(how)
    assert codes == [7, 1]
    cause = {"refused": "ConfigError: target is None", "between": "LookupError: of the script"}[how]
    assert survivor["error"] == "ScheduleAborted"
    assert survivor["text"].startswith(f"aborted by stage 1: {cause}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "exchange", "duty", "place"),
    [
        ("absent", "shapes between stages", "called step or eval", "_warmup"),
        long("unbuilt", "the ranks' stages", "built its ScheduleRRFP", "all_gather"),
    ],
)
def test_a_peer_that_never_comes_is_named_at_the_time_limit(how: str, exchange: str, duty: str, place: str) -> None:
    codes, (waiting,) = ends(how)
    assert codes == [7, 0]
    assert waiting["error"] == "TransportError"
    assert f"the exchange of {exchange} did not end within init_timeout, 1.5 s" in waiting["text"]
    assert f"of the stages' group rank 1 has not {duty}; here it waits" in waiting["text"]
    assert place in waiting["text"]
    assert 1.5 <= waiting["seconds"] < 6
