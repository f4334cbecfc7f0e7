"""The tables and modules that all systems run in their comparison."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from benchmarks.peers.settings import FULL_METHODS, TORCH_1F1B, Settings
from benchmarks.shared.comparison import Cell, Turn
from benchmarks.shared.sleeping import SleepingStage, TaskLog
from benchmarks.shared.tables import Form, make_table, scaled
from rrfp.compute.split.backward import input_gradients
from rrfp.engine.bound import lower_bound


def test_a_v_has_the_work_of_the_whole_in_layers_in_depth_order() -> None:
    split, v = (make_table(form, "mllm", 4, 8, seed=1, step=3, jitter="J0") for form in (Form.SPLIT, Form.V))

    assert v.split
    assert (v.chunks, v.placement) == (2, "v")
    for rows, layers in ((split.forward, v.forward), (split.backward, v.backward)):
        np.testing.assert_allclose(layers[0:-2:2], rows[:-1] / 2)
        np.testing.assert_allclose(layers[1:-2:2], rows[:-1] / 2)
        # The chain's last stage is 1.2 times as slow by the output layer, which belongs to the last layer of the V.
        np.testing.assert_allclose(layers[-2], rows[-1] / 1.2 * 0.5)
        np.testing.assert_allclose(layers[-1], rows[-1] / 1.2 * 0.7)
    assert v.virtual_stages_of(0) == (0, 7)
    assert v.virtual_stages_of(1) == (1, 6)


def test_looped_chunks_are_the_same_layers_as_a_v_s_elsewhere() -> None:
    v, looped = (make_table(form, "mllm", 4, 8, seed=1, step=3, jitter="J3") for form in (Form.V, Form.LOOPED_SPLIT))

    for mine, theirs in ((looped.forward, v.forward), (looped.backward, v.backward), (looped.weight, v.weight)):
        np.testing.assert_array_equal(mine, theirs)
    assert [looped.virtual_stages_of(stage) for stage in (0, 1)] == [(0, 4), (1, 5)]


def test_jitter_delays_the_layers_of_a_v_as_long_as_whole_tasks_in_the_mean() -> None:
    forms = (Form.SPLIT, Form.V)
    plain, jittered = (
        [make_table(form, "llm", 4, 4000, seed=1, step=0, jitter=jitter) for form in forms] for jitter in ("J0", "J3")
    )

    split, v = (after.work().sum() - before.work().sum() for before, after in zip(plain, jittered, strict=True))

    assert v == pytest.approx(split, rel=0.05)
    shortest = (jittered[1].forward - plain[1].forward)[jittered[1].forward > plain[1].forward].min()
    assert shortest == pytest.approx(1.5 * 0.0075 * 0.5, rel=0.2)  # scale x half the floor x the least factor


def test_forms_of_a_step_agree_on_its_work_so_that_their_bounds_do() -> None:
    of = Settings(4, ("mllm",), ("J0",), FULL_METHODS)
    turn = Turn(Cell(4, "mllm", "J0"), 1, TORCH_1F1B)
    whole, split, v, looped, looped_split = tables = [of.table(turn, form) for form in Form]

    assert split.to_unsplit() == whole
    assert looped_split.to_unsplit() == looped
    assert [table.split for table in tables] == [form.is_split for form in Form]
    assert [(table.chunks, table.placement) for table in tables] == [(form.chunks, form.layout) for form in Form]
    for layers in (v, looped):
        assert layers.work().sum() == pytest.approx(whole.work().sum())
    assert lower_bound(split, None) <= lower_bound(whole, None) * (1 + 1e-12)
    for table in tables:
        assert lower_bound(table, None) >= table.work().max()


@pytest.fixture
def log() -> TaskLog:
    return TaskLog()


@pytest.fixture
def stage(log: TaskLog) -> SleepingStage:
    """The middle one of three virtual stages, whose tasks take no time."""
    table = scaled(make_table(Form.SPLIT, "llm", 3, 4, seed=0, step=0, jitter="J0"), 0.0)
    module = SleepingStage(1, 3, 1, 16, log)
    module.open_step(table)
    return module


def gradient_of(stage: SleepingStage) -> float | None:
    return None if stage.weight.grad is None else stage.weight.grad.item()


def ran(log: TaskLog) -> list[str]:
    return [str(span.task) for span in log.spans]


def test_rrfp_sleeps_for_w_when_it_adds_the_gradient(stage: SleepingStage, log: TaskLog) -> None:
    received = torch.zeros(4, requires_grad=True)
    output = stage(received, torch.tensor([2]))

    (gradient,), pending = input_gradients([output], [torch.ones(4)], [received])

    assert gradient is not None
    assert gradient.shape == (4,)
    assert ran(log) == ["F2@1", "B2@1"]
    assert gradient_of(stage) is None
    pending.add_to_gradients()
    assert ran(log) == ["F2@1", "B2@1", "W2@1"]
    assert gradient_of(stage) == 3


def test_torch_sleeps_for_w_when_it_runs_the_function_again(stage: SleepingStage, log: TaskLog) -> None:
    backward = pytest.importorskip("torch.distributed.pipelining._backward")
    received = torch.zeros(4, requires_grad=True)
    output = stage(received, torch.tensor([2]))

    _, groups = backward.stage_backward_input([output], [torch.ones(4)], [received], stage.parameters())
    assert ran(log) == ["F2@1", "B2@1"]
    backward.stage_backward_weight(stage.parameters(), groups)

    assert ran(log) == ["F2@1", "B2@1", "W2@1"]
    assert gradient_of(stage) == 3


@pytest.mark.parametrize(("form", "tasks"), [(Form.WHOLE, ["F0@1", "B0@1"]), (Form.SPLIT, ["F0@1", "B0@1", "W0@1"])])
def test_an_ordinary_backward_sleeps_for_all_tasks_of_the_table(
    stage: SleepingStage, log: TaskLog, form: Form, tasks: Sequence[str]
) -> None:
    stage.open_step(scaled(make_table(form, "llm", 3, 4, seed=0, step=0, jitter="J0"), 0.0))

    stage(torch.zeros(4, requires_grad=True), torch.tensor([0])).sum().backward()

    assert ran(log) == tasks
