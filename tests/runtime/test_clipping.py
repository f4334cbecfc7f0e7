"""``clip_grad_norm_`` of a pipeline: over all stages, on both faces, and when it is called at the wrong moment."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from functools import partial
from typing import Any

import pytest
import torch
from runtime.ranks import BATCH, SOON_S, ThreadedRanks
from runtime.test_watchdog import wait_for_log
from runtime.toys import Bomb, Hold, Ones, expect, loss_fn, placed, stages
from torch import nn

import rrfp
from rrfp.errors import ConfigError, RrfpError
from rrfp.pipeline.faces import BlockingPipeline


def clipped(count: int, max_norm: float, norm_type: float) -> tuple[list[nn.Module], float]:
    """The reference's modules after one step and torch's clipping, and the norm before."""
    modules = stages(count)
    expect(modules, BATCH)
    parameters = [p for module in modules for p in module.parameters()]
    return modules, float(nn.utils.clip_grad_norm_(parameters, max_norm, norm_type))


def assert_same_gradients(ours: list[nn.Module], theirs: list[nn.Module]) -> None:
    for left, right in zip(ours, theirs, strict=True):
        for mine, wanted in zip(left.parameters(), right.parameters(), strict=True):
            assert mine.grad is not None
            torch.testing.assert_close(mine.grad, wanted.grad, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_ranks_get_one_norm_and_scale_by_it(norm_type: float) -> None:
    modules = stages(3)

    def body(stage: int, pipe: BlockingPipeline) -> float:
        pipe.step(BATCH.inputs, BATCH.targets)
        return pipe.clip_grad_norm_(0.01, norm_type)

    norms = {outcome.value for outcome in ThreadedRanks(modules, body).join()}
    expected, norm = clipped(3, 0.01, norm_type)
    assert len(norms) == 1
    assert norms.pop() == pytest.approx(norm, rel=1e-12)
    assert_same_gradients(modules, expected)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_can_be_an_error_on_all_ranks(value: float) -> None:
    """As in torch's function: no gradient is scaled, and the program goes on. By default all are scaled by it."""
    modules = stages(3)

    def body(stage: int, pipe: BlockingPipeline) -> float:
        pipe.step(BATCH.inputs, BATCH.targets)
        (parameter, *_) = modules[stage].parameters()
        assert parameter.grad is not None
        if stage == 1:
            parameter.grad[0] = value
        before = parameter.grad.clone()
        with pytest.raises(RuntimeError, match=rf"the norm of order 2 of all gradients is {value}, must be finite"):
            pipe.clip_grad_norm_(0.01, error_if_nonfinite=True)
        assert torch.equal(parameter.grad.nan_to_num(), before.nan_to_num())
        norm = pipe.clip_grad_norm_(0.01, foreach=True)
        assert not torch.equal(parameter.grad.nan_to_num(), before.nan_to_num())
        modules[stage].zero_grad()
        pipe.step(BATCH.inputs, BATCH.targets)
        assert pipe.clip_grad_norm_(0.01, 2.0, True, False) > 0.01
        return norm

    for outcome in ThreadedRanks(modules, body).join():
        assert outcome.error is None
        assert not math.isfinite(outcome.value)


async def test_a_local_pipeline_refuses_such_a_norm_too() -> None:
    modules = stages(2)
    async with rrfp.local(modules, loss_fn=loss_fn) as pipe:
        await pipe.step(BATCH.inputs, BATCH.targets)
        for parameter in modules[0].parameters():
            assert parameter.grad is not None
            parameter.grad.fill_(math.inf)
        with pytest.raises(RuntimeError, match="of order inf of all gradients is inf, must be finite"):
            await pipe.clip_grad_norm_(1.0, math.inf, error_if_nonfinite=True)


def test_a_rank_that_forgets_to_clip_ends_all_by_name() -> None:
    def body(stage: int, pipe: BlockingPipeline) -> None:
        pipe.step(BATCH.inputs, BATCH.targets)
        if stage != 2:
            pipe.clip_grad_norm_(1.0)
        pipe.step(BATCH.inputs, BATCH.targets)

    for outcome in ThreadedRanks(stages(3), body, stall_after=0.2).join():
        assert "stage 2 is in step 1, stage 0 is in clip_grad_norm_ before that step" in outcome.abort.origin.cause


def test_a_rank_that_clips_late_is_named(caplog: pytest.LogCaptureFixture) -> None:
    told = threading.Event()

    def body(stage: int, pipe: BlockingPipeline) -> None:
        pipe.step(BATCH.inputs, BATCH.targets)
        if stage == 2:
            told.wait(10)
        pipe.clip_grad_norm_(1.0)

    caplog.set_level(logging.WARNING)
    ranks = ThreadedRanks(stages(3), body, stall_after=0.1)
    try:
        wait_for_log(caplog, "clip_grad_norm_ was not called yet on stage 2")
    finally:
        told.set()
    assert [outcome.error for outcome in ranks.join()] == [None] * 3


async def test_a_local_pipeline_clips_between_steps() -> None:
    modules = stages(4)
    async with rrfp.local(placed(modules, 2), loss_fn=loss_fn) as pipe:
        await pipe.step(BATCH.inputs, BATCH.targets)
        norm = await pipe.clip_grad_norm_(0.02)
        expected, wanted = clipped(4, 0.02, 2.0)
        assert norm == pytest.approx(wanted, rel=1e-12)
        assert_same_gradients(modules, expected)
        assert await pipe.clip_grad_norm_(math.inf, 1) > 0
        await pipe.step(BATCH.inputs, BATCH.targets)


async def test_an_object_that_two_stages_share_counts_once() -> None:
    shared = stages(1)[0]
    async with rrfp.local([shared, nn.Sequential(shared)], loss_fn=loss_fn) as pipe:
        await pipe.step(BATCH.inputs, BATCH.targets)
        norm = await pipe.clip_grad_norm_(math.inf)
    wanted = nn.utils.get_total_norm([p.grad for p in shared.parameters() if p.grad is not None])
    assert norm == pytest.approx(float(wanted), rel=1e-14)


async def test_clipping_has_its_time() -> None:
    hold = Hold()
    pipeline = rrfp.local([Bomb(hold)], loss_fn=loss_fn)
    with pytest.raises(RrfpError, match="this pipeline is new; enter it first"):
        await pipeline.clip_grad_norm_(1.0)
    async with pipeline as pipe:
        step = asyncio.create_task(pipe.step(BATCH.inputs, BATCH.targets))
        await asyncio.to_thread(hold.begun.wait)
        with pytest.raises(RrfpError, match="this pipeline is in a step; await that first"):
            await pipe.clip_grad_norm_(1.0)
        hold.release.set()
        await step
        clipping = asyncio.create_task(pipe.clip_grad_norm_(1.0))
        await asyncio.sleep(0)  # it begins
        with pytest.raises(RrfpError, match="this pipeline is clipping gradients; await that first"):
            await pipe.step(BATCH.inputs, BATCH.targets)
        await clipping
    with pytest.raises(RrfpError, match=r"this pipeline is closed$"):
        await pipe.clip_grad_norm_(1.0)


@pytest.mark.parametrize("leaver", [0, 1, 2])
def test_a_program_that_left_is_missed(leaver: int) -> None:
    def body(stage: int, pipe: BlockingPipeline) -> Any:
        pipe.step(BATCH.inputs, BATCH.targets)
        pipe.clip_grad_norm_(1.0)
        return None if stage == leaver else pipe.clip_grad_norm_(1.0)

    outcomes = ThreadedRanks(stages(3), body).join()
    for stage in {0, 1, 2} - {leaver}:
        assert outcomes[stage].abort.origin.stage == leaver
        assert "its program left, but clip_grad_norm_ was called elsewhere" in outcomes[stage].abort.origin.cause


def test_programs_may_leave_as_soon_as_they_have_clipped() -> None:
    def body(stage: int, pipe: BlockingPipeline) -> Any:
        pipe.step(BATCH.inputs, BATCH.targets)
        return [pipe.clip_grad_norm_(1.0) for _ in range(3)]

    for _ in range(5):
        outcomes = ThreadedRanks(stages(4), body).join()
        assert [outcome.error for outcome in outcomes] == [None] * 4


def test_an_error_in_one_program_ends_the_others_clipping() -> None:
    failed: list[float] = []

    def body(stage: int, pipe: BlockingPipeline) -> Any:
        pipe.step(BATCH.inputs, BATCH.targets)
        if stage == 1:
            time.sleep(0.2)
            failed.append(time.monotonic())
            raise ValueError("enough")
        return pipe.clip_grad_norm_(1.0)

    outcomes = ThreadedRanks(stages(3), body).join()
    assert str(outcomes[1].error) == "enough"
    for stage in (0, 2):
        assert str(outcomes[stage].abort) == "aborted by stage 1: ValueError: enough"
        assert outcomes[stage].ended - failed[0] < SOON_S


def test_a_program_without_modules_cannot_be_clipped() -> None:
    with rrfp.local([Ones(), Ones()]).blocking() as pipe, pytest.raises(ConfigError, match="needs modules"):
        pipe.clip_grad_norm_(1.0)


def test_a_refused_call_leaves_the_pipeline_usable() -> None:
    module = nn.Sequential(nn.Embedding(4, 6, sparse=True)).double()
    rows = [torch.tensor([1, 2])] * 2
    targets = [torch.zeros(2, 6, dtype=torch.float64)] * 2
    with rrfp.local([module], loss_fn=loss_fn).blocking() as pipe:
        pipe.step(rows, targets)
        with pytest.raises(ConfigError, match="max_norm is -1"):
            pipe.clip_grad_norm_(-1.0)
        pipe.clip_grad_norm_(math.inf, 10**30)  # an integer beyond 64 bits
        assert pipe.clip_grad_norm_(1.0) > 0.0
        module.zero_grad()
        assert pipe.clip_grad_norm_(1.0) == 0.0
        pipe.step(rows, targets)


class Head(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return loss_fn(self.scale * output, target)


def test_parameters_that_clipping_would_leave_out_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Those of a loss that is no module, unless its stage has them too."""

    def told(modules: list[nn.Module], loss: Any) -> list[str]:
        caplog.clear()
        with rrfp.local(modules, loss_fn=loss).blocking() as pipe:
            for _ in range(2):
                pipe.step(BATCH.inputs, BATCH.targets)
            pipe.evaluate(BATCH.inputs, BATCH.targets)
        return [record.getMessage() for record in caplog.records]

    head = Head()
    for loss in (lambda output, target: head(output, target), head.forward, partial(head)):
        [line] = told(stages(2), loss)
        assert line.startswith(
            "loss_fn gives gradients to 1 parameter(s) that its stage lacks, the first of shape (): clip_grad_norm_, "
        )
        assert line.endswith("; pass the nn.Module that has them as loss_fn")
    modules = stages(2)
    own = next(modules[1].parameters())
    for loss in (head, loss_fn, lambda output, target: loss_fn(output, target) + own.square().sum()):
        assert told(modules, loss) == []
