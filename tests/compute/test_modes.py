"""The caller's torch state on another thread."""

from __future__ import annotations

import contextvars
import copy
import threading
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from compute.stage_driver import Run, build, gradients
from torch import Tensor, nn

from rrfp import Batch, CallerModes
from rrfp.model.tasks import Mode, StepId
from rrfp.testing.reference import reference

T = TypeVar("T")
flavour: contextvars.ContextVar[str] = contextvars.ContextVar("flavour", default="plain")


def on_another_thread(call: Callable[[], T]) -> T:
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join()
    return results[0]


def test_autocast_holds_in_forward_and_not_in_backward() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        modes = CallerModes.capture(Mode.TRAIN)

    def state() -> tuple[bool, torch.dtype, bool]:
        return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()

    assert on_another_thread(lambda: modes.forward(state)) == (True, torch.bfloat16, False)
    assert on_another_thread(lambda: modes.backward(state))[0] is False
    assert on_another_thread(state)[0] is False


def test_autocast_of_the_machines_accelerator_is_carried_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)  # as torch.autocast("cuda") does where there is one
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        assert CallerModes.capture(Mode.TRAIN).autocast == (("cuda", torch.bfloat16),)
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


def test_no_autocast_where_the_caller_had_none() -> None:
    modes = CallerModes.capture(Mode.TRAIN)
    with torch.autocast("cpu"):
        captured = CallerModes.capture(Mode.TRAIN)
    assert not on_another_thread(lambda: modes.forward(torch.is_autocast_enabled, "cpu"))
    assert on_another_thread(lambda: captured.forward(torch.is_autocast_enabled, "cpu"))


def test_default_device() -> None:
    with torch.device("meta"):
        modes = CallerModes.capture(Mode.TRAIN)

    def where() -> str:
        return torch.empty(1).device.type

    assert on_another_thread(lambda: modes.forward(where)) == "meta"
    assert on_another_thread(lambda: modes.backward(where)) == "meta"
    assert on_another_thread(where) == "cpu"


def test_context_variables() -> None:
    token = flavour.set("caller's")
    modes = CallerModes.capture(Mode.TRAIN)
    flavour.reset(token)
    assert on_another_thread(lambda: modes.forward(flavour.get)) == "caller's"
    assert on_another_thread(flavour.get) == "plain"


def test_number_of_threads() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        modes = CallerModes.capture(Mode.TRAIN)
        torch.set_num_threads(1)
        assert on_another_thread(lambda: modes.forward(torch.get_num_threads)) == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("mode", "enabled"), [(Mode.TRAIN, True), (Mode.FORWARD, False)])
def test_the_grad_mode_follows_the_step(mode: Mode, enabled: bool) -> None:
    modes = CallerModes.capture(mode)
    assert on_another_thread(lambda: modes.forward(torch.is_grad_enabled)) is enabled


def test_forward_only_may_be_captured_under_no_grad() -> None:
    with torch.no_grad():
        CallerModes.capture(Mode.FORWARD)


def test_a_stage_computes_in_the_modes_of_open_wherever_it_runs() -> None:
    """Under the caller's autocast, gradients on a lane's thread are bitwise the reference's."""
    modules = [nn.Linear(8, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 8))]
    twins = copy.deepcopy(modules)
    inputs = [torch.randn(2, 8) for _ in range(3)]
    dtypes: list[torch.dtype] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        dtypes.append(output.dtype)
        return (output.float() - target).square().mean()

    programs, graph = build(modules, loss_fn)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run = Run(programs, graph, StepId(0, Mode.TRAIN, 3), Batch(inputs, inputs, None, (1 / 3,) * 3))
        expected = reference(twins, inputs, inputs, loss_fn=loss_fn)
    on_another_thread(run.finish)
    assert dtypes == [torch.bfloat16] * 6
    assert tuple(programs[1].losses().values()) == expected.losses
    for left, right in zip(gradients(modules), gradients(twins), strict=True):
        assert left is not None
        assert right is not None
        assert torch.equal(left, right)


@pytest.mark.gpu
def test_current_cuda_device_and_generator() -> None:
    torch.cuda.init()  # type: ignore[no-untyped-call]
    modes = CallerModes.capture(Mode.TRAIN)
    assert modes.cuda_device == torch.cuda.current_device()
    assert on_another_thread(lambda: modes.forward(torch.cuda.current_device)) == modes.cuda_device
