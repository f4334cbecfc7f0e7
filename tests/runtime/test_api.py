"""What a trainer may do with a pipeline, and what it gets back."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from runtime.toys import TOLERANCE, Bomb, Hold, data, expect, largest_difference, loss_fn, stages
from torch import Tensor, nn

import rrfp
from rrfp.errors import PipelineAborted, RrfpError
from rrfp.model.tasks import Kind, Mode
from rrfp.trace.spans import StepTrace


@pytest.mark.parametrize("loop", ["own", "caller"])
async def test_async_steps_evaluations_and_steps_again(loop: Any) -> None:
    actual, expected, batch = stages(3), stages(3), data(4)
    async with rrfp.local(actual, loss_fn=loss_fn, loop=loop) as pipe:
        first = await pipe.step(batch.inputs, batch.targets)
        scored = await pipe.evaluate(batch.inputs, batch.targets)
        last = await pipe.step(batch.inputs, batch.targets)
    for number, result in ((0, first), (1, last)):
        wanted = expect(expected, batch, step=number)
        assert result.losses == pytest.approx(wanted.losses, rel=TOLERANCE)
        assert result.loss == pytest.approx(wanted.loss, rel=TOLERANCE)
        assert (result.step, result.mode, result.microbatches) == (number, Mode.TRAIN, 4)
    assert (scored.step, scored.mode) == (1, Mode.FORWARD)
    with torch.no_grad():
        assert scored.losses == pytest.approx(expect(expected, batch, step=1).losses, rel=TOLERANCE)
    assert largest_difference(actual, expected) < TOLERANCE


def test_evaluating_leaves_no_gradients_and_gives_outputs_where_there_is_no_loss() -> None:
    modules, batch = stages(3, dropout=0.0), data(5)
    with rrfp.local(modules, loss_fn=loss_fn).blocking() as pipe:
        result = pipe.evaluate(batch.inputs)
    assert result.loss is None
    assert result.losses == ()
    whole = nn.Sequential(*modules)
    for m, inputs in enumerate(batch.inputs):
        torch.testing.assert_close(result.outputs[m], whole(inputs).detach())
    assert all(parameter.grad is None for parameter in whole.parameters())


def test_evaluation_holds_no_more_than_the_limit() -> None:
    with rrfp.local(stages(3), loss_fn=loss_fn, limit=2).blocking() as pipe:
        result = pipe.evaluate(data(9).inputs)
    assert max(result.peak_held) <= 2


def test_the_trace_shows_every_task_once_in_an_order_that_is_possible() -> None:
    batch = data(4)
    with rrfp.local(stages(3), loss_fn=loss_fn).blocking() as pipe:
        pipe.step(batch.inputs, batch.targets)
        result = pipe.step(batch.inputs, batch.targets)
    trace = result.trace
    spans = {span.task: span for span in trace.tasks}
    assert len(spans) == len(trace.tasks) == 2 * 3 * 4
    assert trace.dropped == 0
    assert len(trace.messages) == 2 * 2 * 4
    for message in trace.messages:
        assert message.sent is not None
        assert message.arrived is not None
        assert spans[message.task].end <= message.sent <= message.arrived
        reader = message.task._replace(virtual_stage=message.target)
        assert message.arrived <= spans[reader].start
    for span in trace.tasks:
        assert trace.start <= span.start <= span.end <= trace.end
        if span.task.kind is Kind.B:
            assert spans[span.task._replace(kind=Kind.F)].end <= span.start


def test_every_breakdown_sums_to_the_seconds_of_the_step() -> None:
    batch = data(6)
    with rrfp.local(stages(4), loss_fn=loss_fn, limit="1f1b").blocking() as pipe:
        for _ in range(3):
            result = pipe.step(batch.inputs, batch.targets)
            assert len(result.breakdown) == 4
            for parts in result.breakdown:
                assert parts.step == pytest.approx(result.seconds)
                assert parts.compute + parts.blocking + parts.other == pytest.approx(result.seconds, rel=0.01)
                assert parts.compute > 0
            assert result.seconds == pytest.approx(_length(result.trace), rel=0.01, abs=2e-3)
            assert all(held <= 4 - stage for stage, held in enumerate(result.peak_held))


def _length(trace: StepTrace) -> float:
    return trace.end - trace.start


def test_a_pipeline_is_entered_before_its_steps_and_only_once() -> None:
    pipeline, batch = rrfp.local(stages(1), loss_fn=loss_fn), data(1)
    blocking = pipeline.blocking()
    with pytest.raises(RrfpError, match="new; enter it first"):
        blocking.step(batch.inputs, batch.targets)
    with blocking as pipe:
        pipe.step(batch.inputs, batch.targets)
    with pytest.raises(RrfpError, match="closed"):
        blocking.step(batch.inputs, batch.targets)
    with pytest.raises(RrfpError, match="entered before"), blocking:
        pass


async def test_a_second_step_at_the_same_time_is_refused_and_the_first_goes_on() -> None:
    hold, batch = Hold(), data(2)
    async with rrfp.local([Bomb(hold), *stages(1)], loss_fn=loss_fn) as pipe:
        step = asyncio.create_task(pipe.step(batch.inputs, batch.targets))
        await asyncio.to_thread(hold.begun.wait)
        with pytest.raises(RrfpError, match="in a step; await that first"):
            await pipe.evaluate(batch.inputs)
        hold.release.set()
        assert len((await step).losses) == 2


@pytest.mark.parametrize("loop", ["own", "caller"])
async def test_a_step_that_its_caller_cancels_ends_the_pipeline(loop: Any) -> None:
    hold, batch = Hold(), data(2)
    async with rrfp.local([*stages(1), Bomb(hold)], loss_fn=loss_fn, loop=loop) as pipe:
        step = asyncio.create_task(pipe.step(batch.inputs, batch.targets))
        await asyncio.to_thread(hold.begun.wait)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        with pytest.raises(PipelineAborted, match="the step was cancelled by its caller"):
            await pipe.step(batch.inputs, batch.targets)
    hold.release.set()


def test_threads_have_names_that_say_whose_they_are() -> None:
    with rrfp.local(stages(2), loss_fn=loss_fn).blocking():
        names = {thread.name for thread in threading.enumerate()}
    assert {"rrfp-local", "rrfp-lane-0", "rrfp-lane-1"} <= names


class Remember(nn.Module):
    """Keeps weak references to what it puts out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6).double()
        self.seen: list[weakref.ref[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.linear(x)
        self.seen.append(weakref.ref(hidden))
        return torch.tanh(hidden)


def test_nothing_keeps_activations_alive_after_a_step() -> None:
    """Without the garbage collector: memory must be free when the step returns, not some day."""
    modules, batch = [Remember() for _ in range(3)], data(4)
    gc.collect()
    gc.disable()
    try:
        with rrfp.local(modules, loss_fn=loss_fn).blocking() as pipe:
            pipe.step(batch.inputs, batch.targets)
            alive = [ref() is not None for module in modules for ref in module.seen]
    finally:
        gc.enable()
    assert alive == [False] * 12


def test_a_stage_program_of_ones_own_needs_no_torch_module() -> None:
    class Doubling(rrfp.StageProgram):
        def __init__(self) -> None:
            self.finished: list[int] = []

        def open(self, step: Any, batch: rrfp.Batch) -> None:
            self.batch = batch

        def forward(self, task: rrfp.Task, inputs: tuple[rrfp.Payload, ...]) -> rrfp.Payload:
            value: Any = inputs[0].tensors[0] if inputs else self.batch.inputs[task.microbatch]  # type: ignore[index]
            return rrfp.Payload.pack(value * 2)

        def backward(self, task: rrfp.Task, grads: tuple[rrfp.Payload, ...]) -> tuple[rrfp.Payload, ...]:
            return () if task.virtual_stage == 0 else (rrfp.Payload((torch.ones(1),)),)

        def finish(self, virtual_stage: int) -> None:
            self.finished.append(virtual_stage)

    programs = [Doubling(), Doubling()]
    with rrfp.local(programs).blocking() as pipe:
        result = pipe.step([torch.ones(1), torch.ones(1)])
    assert result.loss is None
    assert [program.finished for program in programs] == [[0], [1]]
