"""``save_trace``: the traces of all ranks in one file, on both faces, and when it cannot be written."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from runtime.ranks import BATCH, ThreadedRanks
from runtime.test_virtual_time import emulated, one_second
from runtime.test_watchdog import wait_for_log
from runtime.toys import Bomb, Hold, loss_fn, stages

import rrfp
from rrfp.core.graph import Graph
from rrfp.core.mesh import Mesh
from rrfp.core.tasks import Task
from rrfp.errors import ConfigError, RrfpError
from rrfp.pipeline.blocking import BlockingPipeline
from rrfp.runtime import trace_saver
from rrfp.runtime.trace_saver import TraceOffer, _refusal
from rrfp.testing.clock import EmulatedStage, SimulatedTransport, TimerLane, run_virtual
from rrfp.trace.chrome_reader import TracedRun, read_chrome


def only_run(path: Path) -> TracedRun:
    [run] = read_chrome(path)
    return run


def clocks(path: Path) -> Any:
    return json.loads(path.read_text())["otherData"]["clocks"]


def test_each_ranks_steps_are_in_one_file_with_the_numbers_that_results_have(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"

    def body(stage: int, pipe: BlockingPipeline) -> Any:
        first = pipe.step(BATCH.inputs, BATCH.targets)
        pipe.evaluate(BATCH.inputs, BATCH.targets)
        results = [first, pipe.step(BATCH.inputs, BATCH.targets)]
        pipe.save_trace(path if stage == 0 else "nowhere/at all")
        pipe.step(BATCH.inputs, BATCH.targets)
        return results

    outcomes = ThreadedRanks(stages(3), body, first_step=40).join()
    assert [outcome.error for outcome in outcomes] == [None] * 3
    run = only_run(path)
    assert (run.name, run.num_stages, [step.step for step in run.steps]) == ("pipeline", 3, [40, 41])
    for number, step in enumerate(run.steps):
        own = [outcome.value[number].trace for outcome in outcomes]
        assert sorted(str(span.task) for span in step.tasks) == sorted(
            str(s.task) for trace in own for s in trace.tasks
        )
        ours = {(span.stage, span.task): span.end - span.start for span in step.tasks}
        for trace in own:
            for span in trace.tasks:
                assert ours[span.stage, span.task] == pytest.approx(span.end - span.start, abs=2e-9)
        assert {entry.stage: entry.peaks for entry in step.peaks} == dict(enumerate(outcomes[0].value[number].peaks))
        assert len(step.messages) == 2 * 2 * 4  # between three stages, both ways, four microbatches
        assert all(message.arrived is not None for message in step.messages)
    [clock] = clocks(path)
    assert (clock["ranks"], clock["seconds"], clock["error_s"]) == ([0, 1, 2], 0, 0)


def test_only_the_newest_steps_are_kept_and_saved(tmp_path: Path) -> None:
    with rrfp.local(stages(2), loss_fn=loss_fn, trace_steps=3).blocking() as pipe:
        for _ in range(5):
            pipe.step(BATCH.inputs, BATCH.targets)
        pipe.save_trace(tmp_path / "all.json")
        pipe.save_trace(tmp_path / "two.json", steps=2)
        pipe.save_trace(tmp_path / "more.json", steps=100)
    assert [step.step for step in only_run(tmp_path / "all.json").steps] == [2, 3, 4]
    assert [step.step for step in only_run(tmp_path / "two.json").steps] == [3, 4]
    assert [step.step for step in only_run(tmp_path / "more.json").steps] == [2, 3, 4]


async def test_on_the_loop_of_the_caller(tmp_path: Path) -> None:
    async with rrfp.local(stages(2), loss_fn=loss_fn, loop="caller") as pipe:
        await pipe.step(BATCH.inputs, BATCH.targets)
        await pipe.save_trace(str(tmp_path / "trace.json"))
        await pipe.step(BATCH.inputs, BATCH.targets)
    assert len(only_run(tmp_path / "trace.json").steps) == 1


def test_in_virtual_time_the_file_has_the_emulated_durations(tmp_path: Path) -> None:
    def duration(task: Task) -> float:
        return 1.0 + task.microbatch + 10 * task.virtual_stage + 0.25 * (task.kind == "B")

    async def main() -> None:
        async with emulated(3, duration) as pipe:
            for _ in range(2):
                await pipe.step(microbatches=4)
            await pipe.save_trace(tmp_path / "trace.json")

    run_virtual(main())
    for step in only_run(tmp_path / "trace.json").steps:
        assert len(step.tasks) == 3 * 4 * 2
        for span in step.tasks:
            assert span.end - span.start == pytest.approx(duration(span.task), abs=2e-9)


MESH = Mesh((("dp", 2), ("pp", 2), ("tp", 2)))


def grouped(body: Any) -> ThreadedRanks:
    programs = [EmulatedStage(Graph.chain(2), lambda task: 0.001, num_bytes=64) for _ in range(8)]
    return ThreadedRanks(programs, body, mesh=MESH)


@pytest.mark.parametrize("piece", [100, trace_saver.ROUND_BYTES])
def test_replicas_are_processes_of_their_own_and_a_group_is_its_leader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(trace_saver, "ROUND_BYTES", piece)  # the smaller takes hundreds of rounds

    def body(rank: int, pipe: BlockingPipeline) -> None:
        pipe.step(microbatches=2)
        pipe.save_trace(tmp_path / "all.json", replica="all")
        pipe.save_trace(tmp_path / "one.json", replica=1)

    assert [outcome.error for outcome in grouped(body).join()] == [None] * 8
    runs = read_chrome(tmp_path / "all.json")
    assert [(run.name, run.num_stages, len(run.steps)) for run in runs] == [("replica 0", 2, 1), ("replica 1", 2, 1)]
    assert [len(run.steps[0].tasks) for run in runs] == [2 * 2 * 2] * 2
    one = only_run(tmp_path / "one.json")
    assert one.name == "replica 1"
    assert [span.task for span in one.steps[0].tasks] == [span.task for span in runs[1].steps[0].tasks]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": 7}, "path is 7, must be the name of a file"),
        ({"path": ""}, "path is '', must be the name of a file"),
        ({"path": b"trace"}, "path is b'trace', must be the name of a file"),
        ({"steps": 0}, "steps is 0, must be an integer >= 1, or None"),
        ({"steps": True}, "steps is True, must be an integer >= 1, or None"),
        ({"replica": 1}, r"replica is 1, must be one of 0\.\.0, or 'all'"),
        ({"replica": None}, r"replica is None, must be one of 0\.\.0, or 'all'"),
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


class OtherHost(TimerLane):
    """The lane of a host whose clock began a million seconds earlier."""

    def now(self) -> float:
        return super().now() + 1e6

    def enqueue(self, call: Any) -> asyncio.Future[Any]:
        moved = asyncio.get_running_loop().create_future()

        def move(done: asyncio.Future[Any]) -> None:
            execution = done.result()
            moved.set_result(replace(execution, started=execution.started + 1e6, ended=execution.ended + 1e6))

        super().enqueue(call).add_done_callback(move)
        return moved


def test_the_times_of_another_host_come_to_the_clock_of_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a millisecond on each edge of the control tree, so an answer takes 1 ms."""
    hosts = iter(["a", "b", "a"])
    monkeypatch.setattr(trace_saver, "own_clock", lambda: next(hosts))

    async def main() -> None:
        lanes = [TimerLane(), OtherHost(), TimerLane()]
        programs = [EmulatedStage(Graph.chain(3), one_second, num_bytes=8, spend=lane.spend) for lane in lanes]
        transport = partial(SimulatedTransport, latency=lambda stage, peer, message: 0.0005)
        options: Any = {"transport": transport, "lane": lanes.__getitem__, "loop": "caller"}
        async with rrfp.local(programs, strict="1f1b", **options) as pipe:
            await pipe.step(microbatches=1)
            await pipe.save_trace(tmp_path / "trace.json")

    run_virtual(main())
    run = only_run(tmp_path / "trace.json")
    here, there = clocks(tmp_path / "trace.json")
    assert (here["ranks"], here["seconds"], here["error_s"]) == ([0, 2], 0, 0)
    assert there["ranks"] == [1]
    assert abs(there["seconds"] + 1e6) <= there["error_s"] == pytest.approx(0.0005)
    assert run.clock_error == there["error_s"]
    starts = {str(span.task): span.start for span in run.steps[0].tasks}
    assert starts["F0@1"] == pytest.approx(1.0005, abs=there["error_s"] + 1e-6)
    assert starts["B0@1"] == pytest.approx(4.0015, abs=there["error_s"] + 1e-6)


def test_ranks_whose_newest_steps_have_none_in_common_are_refused() -> None:
    def offer(first: int, last: int) -> TraceOffer:
        return TraceOffer(None, 0, first, last, "clock", "host", 1 << 20)

    assert _refusal([offer(0, 5), offer(5, 9)]) == ""
    assert "no training step is recorded on all ranks" in _refusal([offer(0, 4), offer(5, 9)])
    assert "no training step is recorded on all ranks" in _refusal([offer(5, 9), offer(0, 4)])
