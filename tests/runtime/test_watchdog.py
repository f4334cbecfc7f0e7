"""A stall is explained: a slow task, a rank that is elsewhere, or a deadlock, which ends on every rank."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
from runtime.ranks import ThreadedRanks
from runtime.toys import Bomb, Hold, Ones, data, loss_fn, stages

import rrfp
from rrfp.pipeline.faces import BlockingPipeline

BATCH = data(3)
STALL_S = 0.1


def step(stage: int, pipe: BlockingPipeline) -> Any:
    return pipe.step(BATCH.inputs, BATCH.targets)


def wait_for_log(caplog: pytest.LogCaptureFixture, text: str) -> str:
    """Wait for a line that contains ``text``."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for record in caplog.records:
            if text in record.getMessage():
                return record.getMessage()
        time.sleep(0.01)
    raise AssertionError(f"no line with {text!r} among {caplog.messages}")


@pytest.mark.parametrize(("slow", "idle"), [(2, 0), (0, 1)])
def test_a_slow_task_is_named_and_nothing_ends(slow: int, idle: int, caplog: pytest.LogCaptureFixture) -> None:
    """Stage 0 starts the polls: of its own accord, or because another one asks for it."""
    caplog.set_level(logging.WARNING)
    hold, batch = Hold(), data(1)  # one microbatch, because the lanes of one process take turns

    def body(stage: int, pipe: BlockingPipeline) -> Any:
        return pipe.step(batch.inputs, batch.targets)

    modules = stages(2)
    modules.insert(slow, Bomb(hold))
    ranks = ThreadedRanks(modules, body, stall_after=STALL_S)
    try:
        line = wait_for_log(caplog, f"has been running F0@{slow} for")
    finally:
        hold.release.set()
    assert line.startswith(f"stage {idle} has been idle for")
    (other,) = {0, 1, 2} - {slow, idle}
    about_it = [message for message in caplog.messages if f"running F0@{slow} for" in message]
    assert not any(message.startswith(f"stage {other} has been idle") for message in about_it)  # one line for all
    assert [outcome.error for outcome in ranks.join()] == [None] * 3


def test_a_rank_outside_its_step_is_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    hold = Hold()

    def body(stage: int, pipe: BlockingPipeline) -> Any:
        if stage == 1:
            hold(0)
        return step(stage, pipe)

    ranks = ThreadedRanks(stages(3), body, stall_after=STALL_S)
    try:
        wait_for_log(caplog, "stage 1 is not in step 0: its program has not called step() yet")
    finally:
        hold.release.set()
    assert [outcome.error for outcome in ranks.join()] == [None] * 3


class Waiting(rrfp.Hint):
    """Waits for ever on stage 1, once it has run two tasks."""

    may_wait = True

    def choose(self, ready: rrfp.ReadySet, view: rrfp.View) -> rrfp.Task | None:
        return None if view.stage == 1 and view.num_enqueued_total == 2 else next(iter(ready))


@pytest.mark.parametrize("count", [2, 4])
def test_a_deadlock_ends_every_rank_with_the_whole_report(count: int) -> None:
    ranks = ThreadedRanks(stages(count), step, stall_after=STALL_S, hint=Waiting())
    for outcome in ranks.join():
        cause = outcome.abort.origin.cause
        assert cause.startswith("DeadlockError: deadlock in step 0: every rank is idle and nothing is in flight\n")
        lines = cause.splitlines()[1:]
        assert [line.split(" waits for: ")[0] for line in lines] == [f"  stage {stage}" for stage in range(count)]
        assert "(ready, but hint Waiting does not choose it)" in lines[1]
        assert "owed by stage 1)" in lines[0]


def test_a_long_reduction_is_no_deadlock(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is in flight and no task is left, but gradients are still being made final."""
    caplog.set_level(logging.WARNING)
    hold = Hold()

    class Reducing(Ones):
        def finish(self, virtual_stage: int) -> None:
            if virtual_stage == 1:
                hold(0)

    modules: Any = [Reducing(), Reducing()]
    ranks = ThreadedRanks(modules, step, stall_after=STALL_S)
    try:
        wait_for_log(caplog, "stage 1 has been running the gradients of virtual stage 1 for")
    finally:
        hold.release.set()
    assert [outcome.error for outcome in ranks.join()] == [None] * 2


def test_polls_harm_no_pipeline_in_use_or_between_steps() -> None:
    """Ranks ask all the time, and polls come anywhere in a step and between two."""
    with rrfp.local(stages(3), loss_fn=loss_fn, stall_after=0.0005).blocking() as pipe:
        for _ in range(40):
            pipe.step(BATCH.inputs, BATCH.targets)
            time.sleep(0.003)  # a checkpoint, say
