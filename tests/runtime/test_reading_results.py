"""The result of a step in threads and processes: reads wait for the reports of all ranks, or end with an error."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from fork_server import fork_server
from runtime.processes import Processes
from runtime.ranks import SOON_S, ThreadedRanks
from runtime.test_callers import in_a_forked_child
from torch import nn

import rrfp
from rrfp.errors import PipelineAborted, RrfpError
from rrfp.lab.emulated import EmulatedStage
from rrfp.model.graph import TaskGraph
from rrfp.model.mesh import Mesh
from rrfp.model.tasks import Kind, Task
from rrfp.pipeline.faces import BlockingPipeline
from rrfp.runtime.stage_runner import StageRunner
from rrfp.runtime.steps.plan import StepPlan

__all__ = ["fork_server"]

#: The last task of a step of one microbatch: stage 1 has done its part before.
LAST = Task(Kind.B, 0, 0)


class TwoStages:
    """Stage 0 stays in the last task of its first step until it is released, or fails there.

    Attributes:
        result: of the step on stage 1.
    """

    def __init__(self, then: Callable[[BlockingPipeline, rrfp.StepResult], Any], **options: Any) -> None:
        self._then = then
        self._returned, self._go_on, self._release = threading.Event(), threading.Event(), threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None
        programs: Any = [EmulatedStage(TaskGraph.chain(2), self._hold) for _ in range(2)]
        self.ranks = ThreadedRanks(programs, self._body, loss_fn=None, **options)

    def _hold(self, task: Task) -> float:
        if task == LAST:
            self._release.wait(50)
            if self.error is not None:
                raise self.error
        return 0.0

    def _body(self, stage: int, pipe: BlockingPipeline) -> Any:
        result = pipe.step(microbatches=1)
        if stage == 0:
            return result
        self.result = result
        self._returned.set()
        self._go_on.wait(50)
        return self._then(pipe, result)

    def returned(self) -> rrfp.StepResult:
        """The result on stage 1, which has it while stage 0 computes."""
        assert self._returned.wait(20), "stage 1 waits for stage 0"
        assert isinstance(self.result, rrfp.StepResult)
        assert self.result.pending is not None
        assert self.result.loss == 0.0
        return self.result

    def go_on(self) -> None:
        """Let the program of stage 1 continue."""
        self._go_on.set()

    def release(self, error: BaseException | None = None) -> None:
        """Let the task of stage 0 end, or fail."""
        self.error = error
        self._release.set()

    def end(self) -> None:
        """Let all go, whatever the test did."""
        self._go_on.set()
        self._release.set()


@pytest.fixture
def start() -> Iterator[Any]:
    made: list[TwoStages] = []

    def make(then: Callable[[BlockingPipeline, rrfp.StepResult], Any], **options: Any) -> TwoStages:
        made.append(TwoStages(then, **options))
        return made[-1]

    yield make
    for job in made:
        job.end()


def seconds_of(pipe: BlockingPipeline, result: rrfp.StepResult) -> float:
    return result.seconds


def nothing(pipe: BlockingPipeline, result: rrfp.StepResult) -> rrfp.StepResult:
    return result


def test_a_read_waits_for_the_slowest_rank_and_the_result_is_then_the_same_on_all(start: Any) -> None:
    job = start(nothing)
    result = job.returned()
    with ThreadPoolExecutor(2) as pool:
        reads = [pool.submit(lambda: result.breakdown), pool.submit(lambda: pickle.loads(pickle.dumps(result)))]
        job.release()
        parts, copied = (read.result(20) for read in reads)
    assert len(parts) == 2
    assert copied == result
    job.go_on()
    first, second = (outcome.value for outcome in job.ranks.join())
    assert (first.seconds, first.breakdown, first.peaks) == (second.seconds, parts, second.peaks)


def test_printing_waits_and_shows_a_row_for_each_stage(start: Any) -> None:
    job = start(nothing)
    result = job.returned()
    assert "breakdown" not in repr(result)
    with ThreadPoolExecutor(1) as pool:
        printed = pool.submit(str, result)
        job.release()
        text = printed.result(20)
    job.go_on()
    job.ranks.join()
    lines = text.splitlines()
    assert lines[0].startswith("step 0, loss 0, 1 microbatches, ")
    heads = lines[2].split()
    assert (heads[0], heads[-1]) == ("stage", "held")
    assert [line.split()[0] for line in lines[4:6]] == ["0", "1"]
    assert text.isascii()


def test_completing_where_no_event_loop_runs_is_refused() -> None:
    """A coroutine that nobody can await would do nothing there."""
    with rrfp.local([nn.Linear(2, 2)], loss_fn=nn.functional.mse_loss) as pipe:
        result = pipe.step(torch.zeros(4, 2), torch.zeros(4, 2), microbatches=2)
        with pytest.raises(RrfpError, match="where no event loop runs: read its attributes, which wait, or"):
            asyncio.run(result.complete())
        assert result.peak_held == (1,)
        assert asyncio.run(awaited(result.complete)) is result


async def awaited(call: Callable[[], Any]) -> Any:
    """What the call's coroutine returns."""
    return await call()


async def test_a_loop_of_the_caller_goes_on_while_a_result_completes(start: Any) -> None:
    job = start(nothing)
    result = await asyncio.to_thread(job.returned)
    completing = asyncio.create_task(result.complete())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(result.complete(), 0.01)
    job.release()
    assert await asyncio.wait_for(completing, 20) is result
    assert result.peak_held == (1, 1)


def test_leaving_waits_for_the_slowest_rank_and_the_result_can_be_read_afterwards(start: Any) -> None:
    job = start(nothing)
    result = job.returned()
    job.go_on()
    job.release()
    assert [outcome.error for outcome in job.ranks.join()] == [None, None]
    assert result.seconds > 0


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_a_failure_elsewhere_is_raised_by_every_call_from_then_on_or_else_by_leaving(start: Any, calls: int) -> None:
    caught: list[str] = []

    def then(pipe: BlockingPipeline, result: rrfp.StepResult) -> None:
        both: list[Callable[[], Any]] = [lambda: result.seconds, lambda: pipe.step(microbatches=1)]
        for call in both[:calls]:
            with pytest.raises(PipelineAborted) as aborted:
                call()
            caught.append(str(aborted.value))

    job = start(then)
    result = job.returned()
    job.go_on()
    job.release(ValueError("broken"))
    first, second = job.ranks.join()
    told = "aborted by stage 0, task B0@0: ValueError: broken"
    assert str(first.abort) == told
    assert caught == [told] * calls
    assert str(second.error) == ("None" if calls else told)
    with pytest.raises(PipelineAborted, match="broken"):
        result.peaks  # noqa: B018


def test_a_read_after_the_caller_itself_failed_raises_that(start: Any) -> None:
    def then(pipe: BlockingPipeline, result: rrfp.StepResult) -> None:
        raise KeyError("mine")

    job = start(then)
    result = job.returned()
    job.go_on()
    first, second = job.ranks.join()
    assert first.abort.origin.cause == "KeyError: 'mine'"
    assert isinstance(second.error, KeyError)
    with pytest.raises(PipelineAborted, match="mine"):
        result.seconds  # noqa: B018


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_read_in_a_forked_child_does_not_wait_for_ever(start: Any) -> None:
    job = start(nothing)
    result = job.returned()
    said = in_a_forked_child(lambda: result.seconds)
    assert said.startswith(f"RrfpError: the reports of this step come to process {os.getpid()}, of which this one (")


class KnowsItsLoop(rrfp.Hint):
    """Says on which loop it runs."""

    loops: ClassVar[dict[int, asyncio.AbstractEventLoop]] = {}

    def choose(self, ready: rrfp.ReadySet, view: rrfp.View) -> rrfp.Task | None:
        self.loops[view.stage] = asyncio.get_running_loop()
        return next(iter(ready))


@pytest.fixture
def unblock(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    monkeypatch.setattr("rrfp.timeouts.LEAVE_S", 0.1)
    monkeypatch.setattr("rrfp.timeouts.JOIN_S", 0.1)
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.allow_blocking(reason="a loop that does not run is the subject")
def test_a_read_raises_where_the_loop_does_not_run_for_too_long(start: Any, unblock: threading.Event) -> None:
    def then(pipe: BlockingPipeline, result: rrfp.StepResult) -> None:
        KnowsItsLoop.loops[1].call_soon_threadsafe(unblock.wait, 50)
        with pytest.raises(PipelineAborted, match=r"stage 1: .*its event loop has not run for"):
            result.seconds  # noqa: B018

    job = start(then, hint=KnowsItsLoop(), stall_after=0.3, abort_after=0.3)
    job.returned()
    job.go_on()
    job.release()
    _, second = job.ranks.join()
    assert second.error is None


@pytest.mark.allow_blocking(reason="a loop that does not run is the subject")
def test_a_read_raises_once_the_pipeline_was_left_though_its_loop_does_not_run(
    start: Any, unblock: threading.Event
) -> None:
    def then(pipe: BlockingPipeline, result: rrfp.StepResult) -> None:
        KnowsItsLoop.loops[1].call_soon_threadsafe(unblock.wait, 50)
        raise KeyError("leaves at once")

    job = start(then, hint=KnowsItsLoop())
    result = job.returned()
    job.go_on()
    with pytest.raises(RrfpError, match="the pipeline was left before"):
        result.seconds  # noqa: B018


def long_last_task(task: Task) -> float:
    return 60.0 if task == LAST else 0.001


def read_after_the_step(stage: int, pipe: BlockingPipeline, connection: Any) -> list[str]:
    """Stage 0 does not return: it is killed in its last task."""
    result = pipe.step(microbatches=1)
    connection.send((result.loss, result.pending is not None))
    connection.recv()
    told = []
    for call in (lambda: result.breakdown, lambda: pipe.step(microbatches=1)):
        try:
            call()
        except PipelineAborted as error:
            told.append(f"{error.origin.stage}: {error.origin.cause}")
    return told


def test_a_rank_killed_between_the_return_and_its_report_is_named_by_the_read_and_the_next_step(tmp_path: Path) -> None:
    ranks = Processes(tmp_path, 3, read_after_the_step, long_last_task, mesh=Mesh((("pp", 3),)))
    try:
        for stage in (1, 2):
            assert ranks.hear(stage) == (0.0, True)
        killed = time.monotonic()
        os.kill(ranks.pid(0), signal.SIGKILL)
        for stage in (1, 2):
            ranks.connections[stage].send("go on")
        for stage in (1, 2):
            end = ranks.end(stage)
            assert end.error == "", "leaving does not raise it again"
            assert [told.startswith("0: PeerLostError: its ") for told in end.value] == [True, True]
            assert end.at - killed < SOON_S
        ranks.join(killed)
    finally:
        ranks.kill()


def test_leaving_raises_no_second_time_for_a_stage_of_the_process_whose_part_was_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage_1_returned = threading.Event()
    run_step = StageRunner.step

    async def step(runner: StageRunner, plan: StepPlan) -> rrfp.StepResult:
        result = await run_step(runner, plan)
        if runner.core.stage == 1:
            stage_1_returned.set()
        return result

    def fail(task: Task) -> float:
        if task == LAST:
            assert stage_1_returned.wait(20)
            raise ValueError("the last task")
        return 0.0

    monkeypatch.setattr(StageRunner, "step", step)
    programs: Any = [EmulatedStage(TaskGraph.chain(2), fail) for _ in range(2)]
    with rrfp.local(programs).blocking() as pipe, pytest.raises(PipelineAborted, match="the last task"):
        pipe.step(microbatches=1)
