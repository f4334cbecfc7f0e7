"""``save_trace``: the traces of all ranks in one file, on both faces."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from runtime.ranks import BATCH, ThreadedRanks
from runtime.test_virtual_time import emulated, one_second
from runtime.toys import loss_fn, stages

import rrfp
from rrfp.lab.traces.chrome_reader import TracedRun, read_chrome
from rrfp.model.graph import TaskGraph
from rrfp.model.mesh import Mesh
from rrfp.model.tasks import Task
from rrfp.pipeline.faces import BlockingPipeline
from rrfp.runtime import trace_saver
from rrfp.testing.clock import EmulatedStage, SimulatedTransport, TimerLane, run_virtual


def only_run(path: Path) -> TracedRun:
    [run] = read_chrome(path)
    return run


def clocks(path: Path) -> Any:
    return written_beside(path)["clocks"]


def written_beside(path: Path) -> Any:
    """What the file has beside the steps."""
    return json.loads(path.read_text())["otherData"]


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
        assert step.peaks == dict(enumerate(outcomes[0].value[number].peaks))
        assert len(step.messages) == 2 * 2 * 4  # between three stages, both ways, four microbatches
        assert all(message.arrived is not None for message in step.messages)
    [clock] = clocks(path)
    assert (clock["ranks"], clock["seconds"], clock["error_s"]) == ([0, 1, 2], 0, 0)
    assert written_beside(path)["job"]["takes_offers"] is True  # as lanes on a CPU do


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
    programs = [EmulatedStage(TaskGraph.chain(2), lambda task: 0.001, num_bytes=64) for _ in range(8)]
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
        programs = [EmulatedStage(TaskGraph.chain(3), one_second, num_bytes=8, spend=lane.spend) for lane in lanes]
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
