"""Who may call a pipeline, from where and when: everybody else gets an error at once that says what to do."""

from __future__ import annotations

import asyncio
import copy
import os
import pickle
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from runtime.ranks import SOON_S, ThreadedRanks
from runtime.toys import Bomb, Hold, data, loss_fn, stages

import rrfp
from rrfp import timeouts
from rrfp.errors import ConfigError, PipelineAborted, RrfpError
from rrfp.pipeline.faces import BlockingPipeline
from rrfp.runtime.steps.plan import StepPlanner

BATCH = data(2)


def pair() -> rrfp.pipeline.api.LocalPipeline:
    return rrfp.local(stages(2), loss_fn=loss_fn)


SECOND_CALLS: dict[str, Callable[[BlockingPipeline], Any]] = {
    "step": lambda pipe: pipe.step(BATCH.inputs, BATCH.targets),
    "evaluate": lambda pipe: pipe.evaluate(BATCH.inputs, BATCH.targets),
    "clip_grad_norm_": lambda pipe: pipe.clip_grad_norm_(1.0),
}


@pytest.mark.parametrize("second", SECOND_CALLS)
def test_of_two_threads_that_step_at_once_one_is_refused_and_the_other_goes_on(
    monkeypatch: pytest.MonkeyPatch, second: str
) -> None:
    """The first is held between the check of its turn and the begin of its step, where the second used to pass."""
    inside, release, planned = threading.Event(), threading.Event(), StepPlanner.plan

    def slow_plan(self: StepPlanner, *arguments: Any, **keywords: Any) -> Any:
        if not inside.is_set():
            inside.set()
            assert release.wait(20)
        return planned(self, *arguments, **keywords)

    monkeypatch.setattr(StepPlanner, "plan", slow_plan)
    with pair().blocking() as pipe:
        results: list[Any] = []
        first = threading.Thread(target=lambda: results.append(pipe.step(BATCH.inputs, BATCH.targets)), daemon=True)
        first.start()
        assert inside.wait(20)
        try:
            with pytest.raises(RrfpError, match="in a step; await that first: it takes one call at a time"):
                SECOND_CALLS[second](pipe)
        finally:
            release.set()
        first.join(20)
        assert len(results) == 1
        pipe.step(BATCH.inputs, BATCH.targets)


def test_a_call_that_is_refused_leaves_the_turn_free() -> None:
    with pair().blocking() as pipe:
        with pytest.raises(rrfp.ConfigError):
            pipe.step(BATCH.inputs[:1], BATCH.targets)
        with pytest.raises(rrfp.ConfigError):
            pipe.clip_grad_norm_(-1.0)
        pipe.step(BATCH.inputs, BATCH.targets)


def test_a_pipeline_that_could_not_be_entered_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(name: str) -> Any:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("rrfp.pipeline.session.LoopThread", no_thread)
    blocking = pair().blocking()
    with pytest.raises(RuntimeError, match="can't start new thread"), blocking:
        pass
    with pytest.raises(rrfp.RrfpError, match="this pipeline is closed"):
        blocking.step(BATCH.inputs, BATCH.targets)


def in_a_forked_child(call: Any) -> str:
    """What ``call`` raises in a child, and whether it took long."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        began, said = time.monotonic(), "nothing was raised"
        try:
            call()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        if time.monotonic() - began > SOON_S:
            said = f"late: {said}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_is_refused_and_leaves_without_touching_its_parents_pipeline() -> None:
    with pair().blocking() as pipe:
        pipe.step(BATCH.inputs, BATCH.targets)
        for call in (lambda: pipe.step(BATCH.inputs, BATCH.targets), lambda: pipe.clip_grad_norm_(1.0)):
            said = in_a_forked_child(call)
            assert said.startswith(f"RrfpError: this pipeline belongs to process {os.getpid()}, of which this one (")
            assert said.endswith("was forked: build a pipeline in the process that uses it")
        assert in_a_forked_child(lambda: pipe.__exit__(None, None, None)) == "nothing was raised"
        assert in_a_forked_child(lambda: leave_with_an_error(pipe)) == "ValueError: mine"
        pipe.step(BATCH.inputs, BATCH.targets)


def leave_with_an_error(pipe: BlockingPipeline) -> None:
    """A worker that was forked inside the block fails: the exception passes through the block."""
    try:
        raise ValueError("mine")
    except ValueError as error:
        pipe.__exit__(type(error), error, None)
        raise


@pytest.mark.allow_blocking(reason="it waits for its child")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
async def test_a_forked_child_leaves_an_async_block_at_once() -> None:
    async with pair() as pipe:
        leaving = pipe.__aexit__(None, None, None)

        def run() -> None:
            with pytest.raises(StopIteration):
                leaving.send(None)

        assert in_a_forked_child(run) == "nothing was raised"
        leaving.close()
        await pipe.step(BATCH.inputs, BATCH.targets)


def test_a_pipeline_on_its_callers_loop_is_refused_on_another() -> None:
    async def program() -> None:
        async with rrfp.local(stages(2), loss_fn=loss_fn, loop="caller") as pipe:
            for call in (
                lambda: pipe.step(BATCH.inputs, BATCH.targets),
                lambda: pipe.evaluate(BATCH.inputs, BATCH.targets),
                lambda: pipe.clip_grad_norm_(1.0),
                lambda: pipe.__aexit__(None, None, None),
            ):
                with pytest.raises(RrfpError, match="runs on the loop that entered it"):
                    await asyncio.to_thread(asyncio.run, call())
            await pipe.step(BATCH.inputs, BATCH.targets)

    asyncio.run(program())


def test_leaving_inside_a_task_is_refused_by_name() -> None:
    holder: list[BlockingPipeline] = []

    def leave(number: int) -> None:
        holder[0].__exit__(None, None, None)

    began = time.monotonic()
    with rrfp.local([*stages(1), Bomb(leave)], loss_fn=loss_fn).blocking() as pipe:
        holder.append(pipe)
        with pytest.raises(PipelineAborted, match="F0@1: RrfpError: the pipeline cannot be left from inside a task"):
            pipe.step(BATCH.inputs, BATCH.targets)
    assert time.monotonic() - began < SOON_S


INNER_CALLS: dict[str, Callable[[Any, Any], object]] = {
    "evaluate": lambda pipe, _: pipe.evaluate(BATCH.inputs),
    "step": lambda pipe, _: pipe.step(BATCH.inputs, BATCH.targets),
    "clip_grad_norm_": lambda pipe, _: pipe.clip_grad_norm_(1.0),
    "save_trace": lambda pipe, _: pipe.save_trace("trace.json"),
    "await evaluate": lambda _, pipeline: asyncio.run(pipeline.evaluate(BATCH.inputs)),
    "enter": lambda *_: pair().blocking().__enter__(),
    "await enter": lambda *_: asyncio.run(pair().__aenter__()),
}


@pytest.mark.parametrize("where", ["loss_fn", "module", "backward"])
@pytest.mark.parametrize("inner", INNER_CALLS)
def test_a_pipeline_inside_a_task_of_another_one_is_an_error_at_once(inner: str, where: str) -> None:
    """As a teacher's outputs in the student's loss: both would wait for torch's one random generator."""
    teacher = rrfp.Pipeline(stages(1)[0], topology=rrfp.Topology(0, 1), transport="inproc", name="teacher")
    student = stages(2)
    with teacher.blocking() as pipe:

        def call(*_: object) -> None:
            INNER_CALLS[inner](pipe, teacher)

        def distilled(output: Any, target: Any) -> Any:
            call()
            return loss_fn(output, target)

        if where != "loss_fn":
            student[1] = Bomb(**{"on_forward" if where == "module" else "on_backward": call})
        loss = distilled if where == "loss_fn" else loss_fn
        began = time.monotonic()
        with rrfp.local(student, loss_fn=loss).blocking() as outer, pytest.raises(PipelineAborted) as caught:
            outer.step(BATCH.inputs, BATCH.targets)
        assert time.monotonic() - began < SOON_S
        message = str(caught.value)
        assert "RrfpError: this pipeline (" in message
        assert ("'teacher', stage 0 of 1" in message) is ("enter" not in inner)
        kind = "B" if where == "backward" else "F"
        assert f"was called inside task {kind}0@1 of another pipeline (2 stages, hint slot-aware-pyramid" in message
        assert message.endswith("call it before the step, and pass its result as a target or an input")
        outputs = pipe.evaluate(BATCH.inputs).outputs
        assert len(outputs) == len(BATCH.inputs)


def test_a_pipeline_called_by_a_thread_for_which_a_task_waits_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The teacher's task and the student's would wait for each other: each is named, and the place of the wait."""
    monkeypatch.setattr(timeouts, "OTHER_THREAD_S", 0.3)
    with rrfp.local(stages(1)).blocking() as teacher, ThreadPoolExecutor(1) as pool:

        def distilled(output: Any, target: Any) -> Any:
            known = pool.submit(teacher.evaluate, BATCH.inputs).result().outputs
            return loss_fn(output, known[0])

        with rrfp.local(stages(2), loss_fn=distilled).blocking() as outer, pytest.raises(PipelineAborted) as caught:
            outer.step(BATCH.inputs, BATCH.targets)
    message = str(caught.value)
    assert re.search(
        r"aborted by stage 0, task F0@0: StageError: task F0@0 cannot have torch's random generators: they belong to "
        r"task F0@1 of another pipeline of this process, which has waited for another thread for 0.3 s at \S+:\d+. "
        r"Modules, loss_fn and hooks cannot call a pipeline of their process, on no thread",
        message,
    ), message


@pytest.mark.parametrize("order", ["before", "within"])
def test_a_task_that_waits_for_another_thread_keeps_no_other_pipeline_for_ever(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the other pipeline's step was there before, it waits; so it does while the task does anything else."""
    monkeypatch.setattr(timeouts, "OTHER_THREAD_S", 0.3)
    other, held = Hold(), Hold()

    def busy(number: int) -> None:
        if number == 0:
            held.begun.set()
            while not held.release.wait(0.02):  # as a poll; each wait is another one
                pass

    first = held if order == "before" else busy
    results: list[Any] = []
    with (
        rrfp.local([Bomb(other), *stages(1)], loss_fn=loss_fn).blocking() as waiting,
        rrfp.local([Bomb(first), *stages(1)], loss_fn=loss_fn).blocking() as holding,
    ):
        threads = [
            threading.Thread(target=lambda pipe=pipe: results.append(pipe.step(BATCH.inputs, BATCH.targets)))
            for pipe in (waiting, holding)
        ]
        if order == "before":
            threads[0].start()
            assert other.begun.wait(20)
            threads[1].start()
            other.release.set()  # its second task comes after the held one
        else:
            threads[1].start()
            assert held.begun.wait(20)
            threads[0].start()
            other.release.set()
        assert held.begun.wait(20)
        threads[0].join(1.0)
        held.release.set()
        for thread in threads:
            thread.join(20)
    assert len(results) == 2


def test_a_pipeline_inside_a_task_of_its_own_is_named_too() -> None:
    holder: list[BlockingPipeline] = []

    def step(number: int) -> None:
        holder[0].step(BATCH.inputs, BATCH.targets)

    with rrfp.local([*stages(1), Bomb(step)], loss_fn=loss_fn).blocking() as pipe:
        holder.append(pipe)
        with pytest.raises(PipelineAborted, match="was called inside task F0@1 of its own: modules, loss_fn and hooks"):
            pipe.step(BATCH.inputs, BATCH.targets)


def test_another_thread_may_leave_while_a_step_runs() -> None:
    hold = Hold()
    pipe = rrfp.local([*stages(1), Bomb(hold)], loss_fn=loss_fn).blocking()
    pipe.__enter__()
    errors: list[BaseException] = []

    def step() -> None:
        try:
            pipe.step(BATCH.inputs, BATCH.targets)
        except BaseException as error:
            errors.append(error)

    stepping = threading.Thread(target=step, daemon=True)
    stepping.start()
    assert hold.begun.wait(20)
    pipe.__exit__(None, None, None)
    hold.release.set()
    stepping.join(20)
    assert "the pipeline was left while a step was running" in str(errors[0])


AWAITED: dict[str, Callable[[Any], Any]] = {
    "step": lambda pipe: pipe.step(BATCH.inputs, BATCH.targets),
    "evaluate": lambda pipe: pipe.evaluate(BATCH.inputs, BATCH.targets),
    "clip_grad_norm_": lambda pipe: pipe.clip_grad_norm_(1.0),
    "unscale_": lambda pipe: pipe.unscale_(),
    "save_trace": lambda pipe: pipe.save_trace("trace.json"),
}


@pytest.mark.parametrize("call", AWAITED)
def test_a_call_of_the_async_pipeline_without_a_loop_names_both_faces(call: str) -> None:
    pipeline = pair()
    both = rf"no event loop runs.*'with pipeline as pipe: pipe\.{call}\(.*'async with pipeline as pipe: await pipe\."
    with pytest.raises(RrfpError, match=both):
        AWAITED[call](pipeline)
    with pipeline as pipe:
        with pytest.raises(RrfpError, match=both):
            AWAITED[call](pipeline)
        assert pipe.step(BATCH.inputs, BATCH.targets).step == 0


async def test_another_thread_hands_calls_to_the_loop_of_the_coroutine_that_entered() -> None:
    loop = asyncio.get_running_loop()
    async with pair() as pipe:

        def step() -> Any:
            return asyncio.run_coroutine_threadsafe(pipe.step(BATCH.inputs, BATCH.targets), loop).result(20)

        assert (await asyncio.to_thread(step)).step == 0


def test_with_enters_the_blocking_pipeline_once_and_leaves_it() -> None:
    pipeline = pair()
    with pipeline as pipe:
        assert type(pipe) is BlockingPipeline
        with pytest.raises(RrfpError, match="entered before; build a new one"), pipeline:
            pass
        assert pipe.step(BATCH.inputs, BATCH.targets).step == 0
    with pytest.raises(RrfpError, match="this pipeline is closed"):
        pipe.step(BATCH.inputs, BATCH.targets)


def test_an_exception_in_a_with_block_aborts_the_pipeline() -> None:
    pipeline = pair()
    with pytest.raises(ZeroDivisionError), pipeline:
        raise ZeroDivisionError
    assert "aborted" in repr(pipeline)


def test_with_refuses_a_pipeline_of_the_callers_loop() -> None:
    pipeline = rrfp.local(stages(2), loss_fn=loss_fn, loop="caller")
    with pytest.raises(ConfigError, match="loop is 'caller', must be 'own' for the blocking API"), pipeline:
        pass


@pytest.mark.parametrize("how", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_pipeline_is_neither_pickled_nor_copied(how: Any) -> None:
    pipeline = pair()
    for one in (pipeline, pipeline.blocking()):
        with pytest.raises(TypeError, match="a pipeline can be neither pickled nor copied, as it holds threads"):
            how(one)


def test_a_call_that_was_refused_on_one_rank_only_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """The rank caught it and took its next batch: all its later data are one batch ahead."""

    def body(stage: int, pipe: BlockingPipeline) -> None:
        for number in range(4):
            wrong = number == 1 and stage == 2
            with suppress(rrfp.ConfigError):
                pipe.step(BATCH.inputs, BATCH.targets[1:] if wrong else BATCH.targets)
            if wrong:
                pipe.step(BATCH.inputs, BATCH.targets)

    ThreadedRanks(stages(3), body).join()
    [told] = [record.getMessage() for record in caplog.records]
    assert "calls refused with ConfigError: 1 on stage 2, 0 on the other ranks" in told


def test_a_call_that_was_refused_on_all_ranks_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    def body(stage: int, pipe: BlockingPipeline) -> None:
        with pytest.raises(rrfp.ConfigError):
            pipe.step(BATCH.inputs, BATCH.targets[1:])
        pipe.step(BATCH.inputs, BATCH.targets)

    for outcome in ThreadedRanks(stages(2), body).join():
        assert outcome.error is None
    assert not caplog.records
