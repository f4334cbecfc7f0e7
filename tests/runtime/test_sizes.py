"""The hints of our own research through the real runtime: the order by sizes, and the defaults."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from runtime.toys import TOLERANCE, WIDTH, data, expect, largest_difference, loss_fn, stages
from torch import Tensor, nn

import rrfp
from rrfp.hints.pyramid import pyramids
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Kind, Mode
from rrfp.runtime.steps.plan import StepPlanner, StepRequest
from rrfp.testing.clock import EmulatedStage, SimulatedTransport, TimerLane, run_virtual


@pytest.mark.parametrize("hint", ["slot-aware-pyramid", "bfw-pyramid"])
def test_pyramids_change_the_order_and_neither_gradients_nor_losses(hint: str) -> None:
    actual, expected, batch = stages(3), stages(3), data(7)
    sizes = [3.0, 1.0, 4.0, 1.5, 5.0, 9.0, 2.0]
    with rrfp.local(actual, loss_fn=loss_fn, hint=hint, split=True, limit="1f1b").blocking() as pipe:
        result = pipe.step(batch.inputs, batch.targets, sizes=sizes)
    wanted = expect(expected, batch)
    assert largest_difference(actual, expected) < TOLERANCE
    assert result.losses == pytest.approx(wanted.losses, rel=TOLERANCE)
    assert all(held <= most for held, most in zip(result.peak_held, (3, 2, 1), strict=True))
    forwards = [span.task for span in result.trace.tasks if span.stage == 0 and span.task.kind is Kind.F]
    assert [task.microbatch for task in forwards] == pyramids(sizes, 12)


@pytest.mark.parametrize(("limit", "is_kept"), [("24B", True), ("6kB", False)])
def test_once_bytes_are_seen_to_be_few_all_stages_keep_the_callers_order(limit: str, is_kept: bool) -> None:
    """Emulated microbatches hold 16 bytes each on two stages: 1F1B holds three of them in all."""
    graph, lanes = TaskGraph.chain(2), [TimerLane() for _ in range(2)]
    programs = [EmulatedStage(graph, lambda task: 1.0, num_bytes=16, spend=lane.spend) for lane in lanes]
    sizes = [3.0, 2.0, 4.0, 2.5, 5.0, 6.0, 3.5]

    async def orders() -> list[list[list[int]]]:
        options: dict[str, Any] = {"transport": SimulatedTransport, "lane": lanes.__getitem__, "limit": limit}
        async with rrfp.local(programs, loop="caller", **options) as pipe:
            traces = [(await pipe.step(microbatches=7, sizes=sizes)).trace for _ in range(2)]
        return [[forwards_of(trace, stage) for stage in range(2)] for trace in traces]

    first, second = run_virtual(orders())
    pyramid = pyramids(sizes, 8)
    assert first == [pyramid] * 2, "nothing is known of their bytes yet"
    assert second == [list(range(7)) if is_kept else pyramid] * 2


def forwards_of(trace: Any, stage: int) -> list[int]:
    tasks = [span.task for span in trace.tasks if span.stage == stage]
    return [task.microbatch for task in tasks if task.kind is Kind.F]


def test_a_size_may_be_a_number_of_numpy_or_a_tensor() -> None:
    sizes: Any = [7, 1.5, np.int64(3), torch.tensor(4), 0]
    plan = StepPlanner().plan(StepRequest(Mode.TRAIN, sizes=sizes))
    assert plan.sizes == (7.0, 1.5, 3.0, 4.0, 0.0)


@pytest.mark.parametrize("size", [-1, math.nan, math.inf, None, "many", torch.ones(2)])
def test_another_size_is_refused_by_its_microbatch(size: Any) -> None:
    with pytest.raises(rrfp.ConfigError, match=r"^sizes\[1\] is .*, must be a finite number >= 0$"):
        StepPlanner().plan(StepRequest(Mode.TRAIN, sizes=[1, size]))


def test_the_defaults_run_a_step_without_sizes() -> None:
    actual, expected, batch = stages(3), stages(3), data(7)
    with rrfp.local(actual, loss_fn=loss_fn).blocking() as pipe:
        result = pipe.step(batch.inputs, batch.targets)
    wanted = expect(expected, batch)
    assert largest_difference(actual, expected) < TOLERANCE
    assert result.losses == pytest.approx(wanted.losses, rel=TOLERANCE)


class Remembering(nn.Module):
    """Adds what the call before it saw."""

    def __init__(self, *, counts: bool = True) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.register_buffer("last", torch.zeros(WIDTH, dtype=torch.float64))
        self.linear = nn.Linear(WIDTH, WIDTH).double()
        self._counts = counts

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x) + self.inner.last
        if self._counts:
            self.inner.last = x.detach().mean(0)
        return output


SIZES = [3.0, 1.0, 4.0, 1.5, 5.0, 9.0, 2.0]


def warnings_of(modules: list[nn.Module], caplog: pytest.LogCaptureFixture, **options: Any) -> list[str]:
    """Of two steps and an evaluation."""
    batch = data(7, ragged=False)
    caplog.clear()
    sizes = SIZES if options.pop("sized", True) else None
    with rrfp.local(modules, loss_fn=loss_fn, **options).blocking() as pipe:
        for _ in range(2):
            pipe.step(batch.inputs, batch.targets, sizes=sizes)
        pipe.evaluate(batch.inputs, batch.targets, sizes=sizes)
    return [record.getMessage() for record in caplog.records if "wrote its buffer" in record.getMessage()]


def test_a_buffer_that_carries_state_out_of_order_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    (warning,) = warnings_of([Remembering(), Remembering()], caplog)
    assert warning.startswith("Remembering on virtual stage ")
    assert "wrote its buffer 'inner.last' (of Module) in F" in warning


def test_so_are_running_statistics(caplog: pytest.LogCaptureFixture) -> None:
    norms = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).double() for _ in range(2)]
    (warning,) = warnings_of([*norms], caplog)
    assert "(of BatchNorm1d)" in warning
    assert warnings_of([norm.eval() for norm in norms], caplog) == []


@pytest.mark.parametrize("options", [{"sized": False}, {"hint": "bf"}])
def test_in_order_nothing_is_reported(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of([Remembering(), Remembering()], caplog, **options) == []


def test_buffers_that_no_forward_writes_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of([Remembering(counts=False), Remembering(counts=False)], caplog) == []


def test_an_evaluation_out_of_order_reports_it_too(caplog: pytest.LogCaptureFixture) -> None:
    """A memory works in eval mode as well; running statistics are then constant."""
    batch = data(7, ragged=False)
    modules = [Remembering().eval(), Remembering().eval()]
    with rrfp.local(modules, loss_fn=loss_fn).blocking() as pipe:
        pipe.evaluate(batch.inputs, batch.targets, sizes=SIZES)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "wrote its buffer 'inner.last' (of Module) in F" in warning
    caplog.clear()
    norms = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).double().eval() for _ in range(2)]
    with rrfp.local([*norms], loss_fn=loss_fn).blocking() as pipe:
        pipe.evaluate(batch.inputs, batch.targets, sizes=SIZES)
    assert not caplog.records
