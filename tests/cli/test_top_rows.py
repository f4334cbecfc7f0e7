"""The rows and the table of `rrfp top`, from answers of ranks."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from rrfp.commands.top import TopRow, rows, table_of
from rrfp.core.usage import Holding
from rrfp.runtime.stall.status import JobStatus, RankAnswer, RankStatus, StepStatus
from rrfp.runtime.status_socket import JobReport

STEP = StepStatus("train", 5, 16, 2, Holding(3, 3 << 20, 1, 1 << 20), 8, None)
IDLE = RankStatus(
    stage=1,
    step=4,
    steps_ended=4,
    running=None,
    running_s=0.0,
    can_run=False,
    completed=69,
    sent=0,
    received=0,
    awaits=("B0@1 (B0@2 owed by stage 2)", "F4@1 (blocked by the memory limit)"),
    waits_for="memory",
    waits_s=0.25,
    training_step=104,
    current=STEP,
    at=10.0,
)
BETWEEN = replace(IDLE, step=None, current=None, waits_for="", awaits=())


def survey(*statuses: RankStatus | None) -> JobStatus:
    absent = ("does not answer", "")
    answers = (RankAnswer(n, n, f"stage {n}", each, absent[each is not None]) for n, each in enumerate(statuses))
    return JobStatus(0, tuple(answers))


def row(status: RankStatus) -> TopRow:
    (only,) = rows(survey(status), None)
    return only


def test_the_story_of_the_first_awaited_task_is_passed_on() -> None:
    assert (
        row(replace(IDLE, story="B0@1 so far: F0@1 began after 0 tasks")).story
        == "B0@1 so far: F0@1 began after 0 tasks"
    )


def test_a_look_at_another_number_of_ranks_before_gives_no_rates() -> None:
    now = rows(survey(IDLE, IDLE), survey(IDLE))
    assert [(each.tasks_per_s, each.steps_per_s) for each in now] == [(None, None)] * 2


@pytest.mark.parametrize(
    ("status", "state", "seconds", "waits_for"),
    [
        (IDLE, "waiting", 0.25, "B0@1 (B0@2 owed by stage 2)"),
        (replace(IDLE, running="B3@1", running_s=1.5, waits_for="", waits_s=0.0), "running", 1.5, ""),
        (replace(IDLE, can_run=True), "starting", None, ""),
        (replace(IDLE, waits_for="drained", awaits=()), "ending", None, "the reports of all ranks"),
        (replace(IDLE, has_returned=True), "between steps", None, ""),
        (BETWEEN, "between steps", None, ""),
        (replace(BETWEEN, gathering="clip_grad_norm_"), "waiting", None, "all ranks in clip_grad_norm_"),
    ],
)
def test_a_rank_runs_or_waits(status: RankStatus, state: str, seconds: float | None, waits_for: str) -> None:
    seen = row(status)
    assert (seen.state, seen.seconds, seen.waits_for) == (state, seconds, waits_for)
    assert seen.step == 104


def test_before_its_first_step_a_rank_has_no_number() -> None:
    assert row(replace(BETWEEN, steps_ended=0, training_step=0)).step is None


def test_rates_count_from_the_look_before_by_the_ranks_own_clock() -> None:
    later = replace(IDLE, at=12.0, completed=79, steps_ended=5)
    (seen,) = rows(survey(later), survey(IDLE))
    assert (seen.tasks_per_s, seen.steps_per_s) == (5.0, 0.5)
    for before in (None, survey(None), survey(later), survey(replace(IDLE, completed=100, steps_ended=9))):
        (seen,) = rows(survey(later), before)
        assert (seen.tasks_per_s, seen.steps_per_s) == (None, None)


def shown(*statuses: RankStatus | None, width: int = 140, before: Any = None) -> list[str]:
    looked = survey(*statuses)
    console = Console(file=io.StringIO(), width=width)
    console.print(table_of(JobReport(7, "2 stages, limit n", looked), rows(looked, before), width))
    assert isinstance(console.file, io.StringIO)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def test_the_table_has_a_line_for_each_rank_and_one_for_the_job() -> None:
    running = replace(IDLE, stage=0, running="B3@0", running_s=75.0, waits_for="", current=replace(STEP, slots=None))
    then = survey(replace(running, at=9.5, steps_ended=3, completed=59), None, IDLE)
    assert shown(running, None, IDLE, before=then) == [
        "2 stages, limit n; process 7, step 104, 2 steps/s",
        "stage step tasks doing for waits for held MiB held ready received tasks/s",
        "0 104 5/16 B3@0 75.0 s 3 3.0 2 1 20.0",
        "1 does not answer",
        "2 104 5/16 waiting 0.250 s memory: B0@1 (B0@2 owed by stage 2) 3/8 3.0 2 1",
    ]


def test_an_evaluation_and_a_limit_on_bytes_show() -> None:
    step = replace(STEP, mode="forward", limit_bytes=4 << 20)
    line = shown(replace(IDLE, current=step))[2]
    assert line.startswith("0 104 (eval) 5/16 waiting")
    assert " 3/8 3.0/4.0 2 1" in line


def test_a_narrow_terminal_has_all_columns_below_each_other() -> None:
    lines = shown(IDLE, IDLE, width=60)
    words = " ".join(lines)
    assert all(head in words for head in ("tasks", "waits for", "MiB", "received", "tasks/s"))
    assert max(map(len, lines)) <= 60
    assert sum(line.split()[:1] == ["0"] for line in lines) > 1


def test_where_a_stage_has_several_ranks_they_have_their_names() -> None:
    looked = JobStatus(0, (RankAnswer(0, 0, "rank 0 (stage 0, tp 0)", IDLE, ""),))
    console = Console(file=io.StringIO(), width=140)
    console.print(table_of(JobReport(7, "x", looked), rows(looked, None), 140))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines()[1].startswith("rank ")
    assert console.file.getvalue().splitlines()[2].startswith("rank 0 (stage 0, tp 0)")
