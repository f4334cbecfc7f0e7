"""What ranks of a failed run leave in `event_log`, fed to a core: it comes to the state in which the run failed."""

from __future__ import annotations

import json
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import runtime.processes as programs
from cli.shell import rrfp
from fork_server import fork_server
from runtime.processes import Processes
from runtime.ranks import ThreadedRanks
from runtime.test_watchdog import Waiting, step, wait_for_log
from runtime.toys import Hold, data, loss_fn, stages

from rrfp import local
from rrfp.errors import PipelineAborted
from rrfp.pipeline.faces import BlockingPipeline
from rrfp.trace.event_log import log_path

__all__ = ["fork_server"]


def replayed(log: Path, *options: str) -> list[str]:
    """What the command prints of a log whose core comes to the recorded state."""
    result = rrfp("check", "replay", log, *options)
    assert (result.exit_code, result.stderr) == (0, "")
    *lines, last = result.stdout.splitlines()
    assert last == "the core is in the recorded state"
    return lines


def test_a_deadlock_that_a_hint_made_is_replayed_to_its_state(tmp_path: Path) -> None:
    ranks = ThreadedRanks(stages(2), step, stall_after=0.2, hint=Waiting(), event_log=tmp_path / "events")
    causes = {outcome.abort.origin.cause for outcome in ranks.join()}
    assert len(causes) == 1
    lines = replayed(log_path(tmp_path / "events", 1))
    assert lines[0].startswith("stage 1: ")
    assert lines[1].startswith("why: stage 0: DeadlockError: deadlock in step 0")
    waits = next(line for line in lines if line.startswith("stage 1 waits for: "))
    assert "(ready, but hint Waiting does not choose it)" in waits
    (cause,) = causes
    assert waits in cause  # the words of the report on the stall
    first = waits.removeprefix("stage 1 waits for: ").split()[0]
    told = replayed(log_path(tmp_path / "events", 1), "--task", first)
    story = [line.strip() for line in told[told.index(f"story of {first}:") + 1 :]]
    assert len(story) > 1
    assert waits.startswith(f"stage 1 waits for: {first} ({story[-1]}); ")
    assert f"{waits}. {first} so far: {', '.join(story[:-1])}" in cause
    answer = json.loads(rrfp("check", "replay", log_path(tmp_path / "events", 1), "--task", first, "--json").stdout)
    assert answer["story"] == story


def test_a_story_is_of_a_task_that_the_rank_runs_or_reads(tmp_path: Path) -> None:
    ThreadedRanks(stages(2), step, stall_after=0.2, hint=Waiting(), event_log=tmp_path).join()
    for task, reason in (("F9@1", "which stage 1 neither runs nor reads in step 0"), ("F1", "not of the form F3@5")):
        result = rrfp("check", "replay", log_path(tmp_path, 1), "--task", task)
        assert result.exit_code == 2
        assert reason in result.stderr


def test_the_survivors_of_a_killed_rank_are_replayed_to_their_state(tmp_path: Path) -> None:
    events = tmp_path / "events"
    ranks = Processes(tmp_path, 3, programs.steps_for_ever, transport="auto", event_log=str(events))
    try:
        for stage in range(3):
            assert ranks.hear(stage) == "stepping"
        os.kill(ranks.pid(1), signal.SIGKILL)
        assert [ranks.end(stage).error for stage in (0, 2)] == ["PipelineAborted"] * 2
    finally:
        ranks.kill()
    assert {path.name for path in events.iterdir()} == {"events-rank0.jsonl", "events-rank2.jsonl"}
    for stage in (0, 2):
        lines = replayed(log_path(events, stage))
        assert lines[0].startswith(f"stage {stage}: ")
        assert lines[1].startswith("why: stage 1: PeerLostError: ")
        assert any(line.startswith("in step ") for line in lines)


def test_where_no_log_can_be_written_the_failure_stays_what_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    batch, folder = data(2), tmp_path / "logs"
    pipeline = local(stages(2), loss_fn=loss_fn, hint=Waiting(), stall_after=0.2, event_log=folder)
    folder.rmdir()
    with pytest.raises(PipelineAborted, match="DeadlockError"), pipeline.blocking() as pipe:
        pipe.step(batch.inputs, batch.targets)
    lines = {record.getMessage() for record in caplog.records if "event log" in record.getMessage()}
    assert lines == {  # more than once each, where a busy machine stalled before the deadlock
        f"stage {stage} has not written its event log: {log_path(folder, stage)}: cannot be written (No such file or "
        "directory)"
        for stage in range(2)
    }


def test_a_log_whose_events_lead_elsewhere_is_told_by_its_first_difference(tmp_path: Path) -> None:
    ThreadedRanks(stages(2), step, stall_after=0.2, hint=Waiting(), event_log=tmp_path).join()
    log = log_path(tmp_path, 0)
    lines = log.read_text().splitlines()
    cut = next(number for number, line in enumerate(lines) if line.startswith('["Completed"'))
    log.write_text("\n".join((*lines[:cut], *lines[cut + 1 :])))
    result = rrfp("check", "replay", log)
    assert result.exit_code == 1
    assert "refused event " in result.stdout
    assert " after the replay, was " in result.stderr
    answer = json.loads(rrfp("check", "replay", log, "--json").stdout)
    assert answer["different"]
    assert answer["refused"]


def test_a_stall_that_passes_leaves_the_state_in_which_a_rank_waited(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    hold = Hold()

    def body(stage: int, pipe: BlockingPipeline) -> Any:
        if stage == 1:
            hold(0)
        return step(stage, pipe)

    ranks = ThreadedRanks(stages(2), body, stall_after=0.2, event_log=tmp_path)
    try:
        wait_for_log(caplog, "stage 1 is not in step 0: its program has not called step() yet")
        lines = replayed(log_path(tmp_path, 0))
    finally:
        hold.release.set()
    assert [outcome.error for outcome in ranks.join()] == [None] * 2
    assert lines[1] == "why: stage 1 is not in step 0: its program has not called step() yet"
    assert lines[-1].startswith("stage 0 waits for: ")
    assert "owed by stage 1" in lines[-1]
    assert replayed(log_path(tmp_path, 0))[1] == lines[1]  # leaving in order did not replace it
