"""``save_trace`` at a wrong time, with wrong arguments, into a file that cannot be written, or on some ranks only."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from runtime.ranks import BATCH, ThreadedRanks
from runtime.test_watchdog import wait_for_log
from runtime.toys import Bomb, Hold, loss_fn, stages

import rrfp
from rrfp.errors import ConfigError, RrfpError
from rrfp.pipeline.faces import BlockingPipeline
from rrfp.runtime.trace_saver import TraceOffer, _refusal


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": 7}, "path is 7, must be the name of a file"),
        ({"path": ""}, "path is '', must be the name of a file"),
        ({"path": b"trace"}, "path is b'trace', must be the name of a file"),
        ({"steps": 0}, "steps is 0, must be a whole number >= 1, or None"),
        ({"steps": True}, "steps is True, must be a whole number >= 1, or None"),
        ({"replica": 1}, r"replica is 1, must be 0\.\.0, or 'all'"),
        ({"replica": None}, r"replica is None, must be 0\.\.0, or 'all'"),
    ],
)
def test_an_argument_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    with rrfp.local(stages(1), loss_fn=loss_fn).blocking() as pipe:
        pipe.step(BATCH.inputs, BATCH.targets)
        with pytest.raises(ConfigError, match=message):
            pipe.save_trace(**{"path": tmp_path / "trace.json", **arguments})
        pipe.save_trace(tmp_path / "trace.json")


def test_without_a_recorded_step_there_is_one_clear_error(tmp_path: Path) -> None:
    with rrfp.local(stages(2), loss_fn=loss_fn).blocking() as pipe:
        pipe.evaluate(BATCH.inputs, BATCH.targets)
        with pytest.raises(ConfigError, match="no training step is recorded: save_trace goes after a step"):
            pipe.save_trace(tmp_path / "trace.json")
    with rrfp.local(stages(2), loss_fn=loss_fn, trace_steps=0).blocking() as pipe:
        pipe.step(BATCH.inputs, BATCH.targets)
        with pytest.raises(ConfigError, match="trace_steps is 0, must be at least 1 for save_trace"):
            pipe.save_trace(tmp_path / "trace.json")
    assert not list(tmp_path.iterdir())


async def test_saving_has_its_time(tmp_path: Path) -> None:
    hold = Hold()
    pipeline = rrfp.local([Bomb(hold)], loss_fn=loss_fn)
    with pytest.raises(RrfpError, match="this pipeline is new; enter it first"):
        await pipeline.save_trace(tmp_path / "trace.json")
    async with pipeline as pipe:
        step = asyncio.create_task(pipe.step(BATCH.inputs, BATCH.targets))
        await asyncio.to_thread(hold.begun.wait)
        with pytest.raises(RrfpError, match="this pipeline is in a step; await that first"):
            await pipe.save_trace(tmp_path / "trace.json")
        hold.release.set()
        await step
        saving = asyncio.create_task(pipe.save_trace(tmp_path / "trace.json"))
        await asyncio.sleep(0)  # it begins
        with pytest.raises(RrfpError, match="this pipeline is saving a trace; await that first"):
            await pipe.step(BATCH.inputs, BATCH.targets)
        await saving
    with pytest.raises(RrfpError, match=r"this pipeline is closed$"):
        await pipe.save_trace(tmp_path / "trace.json")


def test_a_path_that_cannot_be_written_is_an_error_on_every_rank_and_training_goes_on(tmp_path: Path) -> None:
    def body(stage: int, pipe: BlockingPipeline) -> Any:
        pipe.step(BATCH.inputs, BATCH.targets)
        with pytest.raises(ConfigError) as caught:
            pipe.save_trace(tmp_path / "absent" / "trace.json")
        pipe.step(BATCH.inputs, BATCH.targets)
        return str(caught.value)

    reason = f"save_trace on rank 0: {tmp_path}/absent/trace.json: cannot be written (No such file or directory)"
    assert [outcome.value for outcome in ThreadedRanks(stages(3), body).join()] == [reason] * 3


def test_a_device_that_is_full_is_an_error_too() -> None:
    with rrfp.local(stages(1), loss_fn=loss_fn).blocking() as pipe:
        pipe.step(BATCH.inputs, BATCH.targets)
        with pytest.raises(ConfigError, match=r"/dev/full: cannot be written \(No space left on device\)"):
            pipe.save_trace("/dev/full")


def test_ranks_that_ask_for_different_steps_all_get_the_difference(tmp_path: Path) -> None:
    def body(stage: int, pipe: BlockingPipeline) -> Any:
        pipe.step(BATCH.inputs, BATCH.targets)
        with pytest.raises(ConfigError, match="steps is 1 on rank 0 and None on rank 2, must be the same on all ranks"):
            pipe.save_trace(tmp_path / "trace.json", steps=None if stage == 2 else 1)
        pipe.save_trace(tmp_path / "trace.json")

    assert [outcome.error for outcome in ThreadedRanks(stages(3), body).join()] == [None] * 3


def test_a_rank_that_steps_instead_ends_all_by_name(tmp_path: Path) -> None:
    def body(stage: int, pipe: BlockingPipeline) -> None:
        pipe.step(BATCH.inputs, BATCH.targets)
        if stage != 2:
            pipe.save_trace(tmp_path / "trace.json")
        pipe.step(BATCH.inputs, BATCH.targets)

    for outcome in ThreadedRanks(stages(3), body, stall_after=0.2).join():
        assert "stage 2 is in step 1, stage 0 is in save_trace before that step" in outcome.abort.origin.cause
    assert not list(tmp_path.iterdir())


def test_a_rank_that_clips_instead_ends_all_by_name(tmp_path: Path) -> None:
    def body(stage: int, pipe: BlockingPipeline) -> None:
        pipe.step(BATCH.inputs, BATCH.targets)
        if stage == 2:
            pipe.clip_grad_norm_(1.0)
        pipe.save_trace(tmp_path / "trace.json")

    for outcome in ThreadedRanks(stages(3), body, stall_after=0.2).join():
        assert "stage 0 is in save_trace, stage 2 is in clip_grad_norm_" in outcome.abort.origin.cause


def test_a_program_that_left_is_missed(tmp_path: Path) -> None:
    def body(stage: int, pipe: BlockingPipeline) -> None:
        pipe.step(BATCH.inputs, BATCH.targets)
        if stage != 1:
            pipe.save_trace(tmp_path / "trace.json")

    outcomes = ThreadedRanks(stages(3), body).join()
    for stage in (0, 2):
        assert outcomes[stage].abort.origin.stage == 1
        assert "its program left, but save_trace was called elsewhere" in outcomes[stage].abort.origin.cause


def test_a_rank_that_is_late_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told = threading.Event()

    def body(stage: int, pipe: BlockingPipeline) -> None:
        pipe.step(BATCH.inputs, BATCH.targets)
        if stage == 2:
            told.wait(10)
        pipe.save_trace(tmp_path / "trace.json")

    ranks = ThreadedRanks(stages(3), body, stall_after=0.1)
    try:
        wait_for_log(caplog, "save_trace was not called yet on stage 2")
    finally:
        told.set()
    assert [outcome.error for outcome in ranks.join()] == [None] * 3


def test_ranks_whose_newest_steps_have_none_in_common_are_refused() -> None:
    def offer(first: int, last: int) -> TraceOffer:
        return TraceOffer(None, 0, first, last, "clock", "host", 1 << 20)

    assert _refusal([offer(0, 5), offer(5, 9)]) == ""
    assert "no training step is recorded on all ranks" in _refusal([offer(0, 4), offer(5, 9)])
    assert "no training step is recorded on all ranks" in _refusal([offer(5, 9), offer(0, 4)])
