"""The display at the terminal: what it shows, and where it shows nothing."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from callbacks.steps import RUN_ENDED, begun, ended
from rich.console import Console
from runtime.toys import data, loss_fn, stages

import rrfp
from rrfp.callbacks import Callback, Progress, RunAborted, RunBegun, Stall, StepEnded
from rrfp.core.usage import Peaks
from rrfp.errors import ConfigError, Origin
from rrfp.model.tasks import Mode

BATCH = data(3)


def console(*, terminal: bool = True, width: int = 100) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, color_system=None)


def printed(where: Console) -> str:
    assert isinstance(where.file, io.StringIO)
    return where.file.getvalue()


def run(progress: Callback, *events: Any, start: RunBegun | None = None) -> None:
    """A run with these events."""
    progress.run_begun(begun() if start is None else start)
    for event in events:
        name = {Stall: "stall", RunAborted: "aborted"}.get(type(event), "step_ended")
        if name == "step_ended" and event.mode is Mode.FORWARD:
            name = "evaluation_ended"
        getattr(progress, name)(event)
    progress.run_ended(RUN_ENDED)


def test_it_shows_steps_loss_speed_and_every_stage() -> None:
    where = console()
    progress = Progress(40, tokens=100, console=where)
    run(progress, ended(0), ended(9, mode=Mode.FORWARD, loss=0.75), ended(9, loss=0.25, time=1020.0))
    last = printed(where).rsplit("step 10/40", 1)[1]
    # Ten steps in 20 s by the two that were seen: 10 s each, and 30 are left.
    assert last.splitlines()[0].strip() == "loss 0.25  held-out 0.75  250 ms  3,200 tokens/s  0:05:00 left"
    table = last.splitlines()[2:4]
    for stage, line in enumerate(table):
        # Its rank; compute, input, memory, nothing left; MiB sent; held of 8 slots, MiB without a limit.
        assert line.split() == [str(stage), str(stage), "50", "25", "10", "15", "1.0", "3/8", "5.0"]


def with_ranks(step: StepEnded, ranks: int) -> StepEnded:
    """Each stage on so many ranks, of which each holds 1 MiB more than the one before."""
    stages = [
        replace(stage, peaks_by_rank={rank: Peaks(rank, rank << 20) for rank in range(i * ranks, (i + 1) * ranks)})
        for i, stage in enumerate(step.stages)
    ]
    return replace(step, stages=tuple(stages))


def test_every_rank_of_a_stage_has_a_row_with_what_it_held() -> None:
    where = console()
    run(Progress(console=where), with_ranks(ended(0), 2))
    rows = [line.split() for line in printed(where).rsplit("step 1", 1)[1].splitlines()[2:6]]
    of_stage = ["50", "25", "10", "15", "1.0"]
    assert rows == [
        ["0", "0", *of_stage, "0/8", "0.0"],
        ["1", "1/8", "1.0"],
        ["1", "2", *of_stage, "2/8", "2.0"],
        ["3", "3/8", "3.0"],
    ]


def test_of_many_ranks_each_stage_shows_the_one_that_held_most() -> None:
    where = console()
    run(Progress(console=where), with_ranks(ended(0), 9))
    rows = [line.split() for line in printed(where).rsplit("step 1", 1)[1].splitlines()[2:4]]
    assert [(row[:2], row[-2:]) for row in rows] == [(["0", "8"], ["8/8", "8.0"]), (["1", "17"], ["17/8", "17.0"])]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.25, "32 microbatches/s"), (64.0, "0.125 microbatches/s"), (0.001, "8,000 microbatches/s")],
)
def test_without_tokens_the_speed_is_in_microbatches_of_all_replicas(seconds: float, text: str) -> None:
    where = console()
    run(Progress(console=where), ended(0, seconds=seconds))
    assert f"  {text}" in printed(where)


def test_a_stall_is_shown_until_the_next_step_and_an_abort_stays() -> None:
    where = console()
    aborted = RunAborted(1003.0, 1, Origin(1, "F0@1", "ValueError: boom"))
    run(Progress(console=where), ended(0), Stall(1001.0, 1, "stage 1 has been running F0@1\nstack"), ended(1), aborted)
    text = printed(where)
    assert "stall: stage 1 has been running F0@1" in text
    assert "stack" not in text
    assert "stall" not in text.rsplit("step 2", 1)[1]
    assert "aborted by stage 1, task F0@1: ValueError: boom" in text.rsplit("step 2", 1)[1]


def test_a_step_without_figures_of_stages_has_no_table() -> None:
    where = console()
    run(
        Progress(console=where), ended(0), ended(1, stages=0, loss=0.25), RunAborted(1003.0, 2, Origin(1, None, "gone"))
    )
    last = printed(where).rsplit("step 2", 1)[1].splitlines()
    assert last[0].split()[:4] == ["loss", "0.25", "250", "ms"]
    assert last[1] == "aborted by stage 1: gone"


@pytest.mark.parametrize("start", [begun(rank=1), begun()], ids=["another rank", "no terminal"])
def test_it_is_silent_on_another_rank_and_without_a_terminal(start: RunBegun) -> None:
    where = console(terminal=start.topology.rank > 0)
    run(Progress(4, console=where), ended(0), start=start)
    assert printed(where) == ""


def test_many_stages_and_a_narrow_terminal_are_legible() -> None:
    where = console(width=50)
    run(Progress(console=where), ended(0, stages=64))
    lines = printed(where).splitlines()
    assert any(line.startswith("15 of 64") for line in lines)
    assert max(len(line.rstrip()) for line in lines if "\x1b" not in line) <= 50


def test_a_byte_limit_is_shown_in_the_unit_of_the_bytes() -> None:
    where = console()
    step = ended(0)
    run(Progress(console=where), replace(step, stages=tuple(replace(s, byte_limit=64 << 20) for s in step.stages)))
    assert "5.0/64.0" in printed(where)


def test_the_cursor_is_shown_on_a_line_of_its_own_at_any_time_and_no_line_is_left_empty_at_the_end() -> None:
    where = console()
    progress = Progress(console=where)
    progress.run_begun(begun())
    aborted = RunAborted(1003.0, 1, Origin(1, "F0@1", "ValueError: boom"))
    for event in (None, ended(0), aborted):
        if isinstance(event, RunAborted):
            progress.aborted(event)
        elif event is not None:
            progress.step_ended(event)
        text = printed(where)
        assert text.endswith("\n")
        assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l")
    progress.run_ended(RUN_ENDED)
    assert printed(where).removesuffix("\x1b[?25h").endswith("aborted by stage 1, task F0@1: ValueError: boom\n")


def test_it_follows_a_real_run() -> None:
    where = console()
    with rrfp.local(stages(2), loss_fn=loss_fn, callbacks=[Progress(3, console=where)]).blocking() as pipe:
        results = [pipe.step(BATCH.inputs, BATCH.targets) for _ in range(3)]
    assert f"loss {results[-1].loss:.4g}" in printed(where).rsplit("step 3/3", 1)[1]


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "many"])
def test_impossible_steps_are_refused(steps: Any) -> None:
    with pytest.raises(ConfigError, match=r"steps is .*, must be a whole number >= 1, or None"):
        Progress(steps)


def test_what_is_no_console_is_refused() -> None:
    wrong: Any = "stderr"
    with pytest.raises(ConfigError, match=r"console is of type str, must be a rich\.console\.Console, or None"):
        Progress(console=wrong)
