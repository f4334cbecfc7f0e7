"""Modes and hooks around a step act on its tasks, which run on other threads, as they would on an ordinary loop."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from runtime.toys import TOLERANCE, WIDTH, data, expect, largest_difference, loss_fn, same_bits, stages
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils import _python_dispatch
from torch.utils.flop_counter import FlopCounterMode

import rrfp
from rrfp.compute import caller_context
from rrfp.compute.caller_context import ThreadModes
from rrfp.compute.split import backward as split_backward

STAGES, MICROBATCHES = 3, 4

split = pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])


@pytest.fixture(autouse=True)
def _every_layer_is_deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_backward, "MIN_FLOPS", 0.0)


class Calls(TorchFunctionMode):
    """Counts the calls of linear layers, and on how many threads they were."""

    def __init__(self) -> None:
        self.count = 0
        self.threads: set[int] = set()
        self.names: set[str] = set()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(function.__name__)
        if function is nn.functional.linear:
            self.count += 1
            self.threads.add(threading.get_ident())
        return function(*args, **(kwargs or {}))


class Packed:
    """Keeps saved tensors outside of torch, as an offloading to disk would; counts."""

    def __init__(self) -> None:
        self.packed = self.unpacked = 0

    def pack(self, tensor: Tensor) -> Any:
        self.packed += 1
        return tensor.detach().numpy().copy()

    def unpack(self, packed: Any) -> Tensor:
        self.unpacked += 1
        return torch.from_numpy(packed)


@split
def test_a_flop_counter_around_a_step_counts_as_around_an_ordinary_loop(split: bool) -> None:
    batch = data(MICROBATCHES)
    with FlopCounterMode(display=False) as wanted:
        expect(stages(STAGES), batch)
    with rrfp.local(stages(STAGES), loss_fn=loss_fn, split=split).blocking() as pipe:
        with FlopCounterMode(display=False) as counted:
            pipe.step(batch.inputs, batch.targets)
        assert counted.get_total_flops() == wanted.get_total_flops() > 0
        pipe.step(batch.inputs, batch.targets)
    assert counted.get_total_flops() == wanted.get_total_flops()


@split
def test_a_function_mode_sees_the_modules_of_all_stages_and_only_while_it_is_active(split: bool) -> None:
    batch, calls = data(MICROBATCHES), Calls()
    with rrfp.local(stages(STAGES), loss_fn=loss_fn, split=split).blocking() as pipe:
        with calls, torch.device("cpu"):
            pipe.step(batch.inputs, batch.targets)
            assert calls.count == STAGES * MICROBATCHES
            assert ("grad" if split else "backward") in calls.names
            pipe.evaluate(batch.inputs)
        pipe.step(batch.inputs, batch.targets)
    assert calls.count == 2 * STAGES * MICROBATCHES
    assert len(calls.threads) == STAGES


@split
def test_every_saved_tensor_goes_through_the_callers_hooks(split: bool) -> None:
    """Also in the first step, in which the memory that a microbatch keeps is measured by hooks too."""
    actual, expected, batch = stages(STAGES), stages(STAGES), data(MICROBATCHES)
    wanted, ours = Packed(), Packed()
    with saved_tensors_hooks(wanted.pack, wanted.unpack):
        expect(expected, batch)
    with rrfp.local(actual, loss_fn=loss_fn, split=split, deterministic=True).blocking() as pipe:
        with saved_tensors_hooks(ours.pack, ours.unpack):
            pipe.step(batch.inputs, batch.targets)
        assert (ours.packed, ours.unpacked) == (wanted.packed, wanted.unpacked)
        assert same_bits(actual, expected)
        pipe.step(batch.inputs, batch.targets)
    assert (ours.packed, ours.unpacked) == (wanted.packed, wanted.unpacked)


def test_a_tensor_behind_a_hook_is_unpacked_once_by_a_split_backward() -> None:
    module, hooks = nn.Conv1d(WIDTH, WIDTH, 1).double(), Packed()
    inputs = [torch.randn(2, WIDTH, 5, dtype=torch.float64)]
    pipeline = rrfp.local([module], loss_fn=loss_fn, split=True).blocking()
    with pipeline as pipe, saved_tensors_hooks(hooks.pack, hooks.unpack):
        pipe.step(inputs, inputs)
    assert hooks.packed == hooks.unpacked


def test_bytes_held_are_those_that_the_hooks_leave_in_the_memory_of_the_tensor() -> None:
    """And steps without hooks are counted as ever: what was measured under hooks is not taken for theirs."""
    batch, hooks = data(1, ragged=False), Packed()

    def peak(pipe: Any) -> int:
        return int(pipe.step(batch.inputs, batch.targets).peak_bytes[0])

    with rrfp.local(stages(1, dropout=0.0), loss_fn=loss_fn).blocking() as pipe:
        with saved_tensors_hooks(hooks.pack, hooks.unpack):
            offloaded = peak(pipe)
        plain = peak(pipe)
        with saved_tensors_hooks(lambda x: x, lambda x: x):
            kept = peak(pipe)
        with saved_tensors_hooks(hooks.pack, hooks.unpack):
            assert peak(pipe) == offloaded
        assert peak(pipe) == plain
    rows = 2 * WIDTH * 8  # the input, tanh's output and the target, each two rows of float64
    assert (offloaded, plain, kept) == (0, 3 * rows, 3 * rows)


def test_threads_take_turns_in_the_callers_modes() -> None:
    with Calls():
        modes = ThreadModes.read()
    assert modes is not None

    def enter() -> None:
        with modes.entered():
            pass

    other = threading.Thread(target=enter)
    with modes.entered():
        other.start()
        other.join(0.05)
        assert other.is_alive()
    other.join(10)
    assert not other.is_alive()


def test_a_profiler_of_the_callers_thread_alone_gets_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    batch = data(2)
    with rrfp.local(stages(2), loss_fn=loss_fn).blocking() as pipe, profile(activities=[ProfilerActivity.CPU]):
        pipe.step(batch.inputs, batch.targets)
        pipe.evaluate(batch.inputs)
    (message,) = caplog.messages
    assert "_ExperimentalConfig(profile_all_threads=True)" in message


def test_a_profiler_of_all_threads_records_tasks_and_gets_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    batch = data(2)
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    profiler = profile(activities=[ProfilerActivity.CPU], experimental_config=config)
    with rrfp.local(stages(2), loss_fn=loss_fn).blocking() as pipe, profiler:
        pipe.step(batch.inputs, batch.targets)
    assert {event.key: event.count for event in profiler.key_averages()}["aten::linear"] == 2 * 2
    assert not caplog.messages


@pytest.fixture
def _torch_without_a_private_name(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    caller_context._are_readable.cache_clear()
    monkeypatch.delattr(_python_dispatch, "_get_current_dispatch_mode_stack")
    yield
    caller_context._are_readable.cache_clear()


@pytest.mark.usefixtures("_torch_without_a_private_name")
def test_where_torch_does_not_tell_its_modes_a_pipeline_says_so_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    actual, expected, batch, calls = stages(2), stages(2), data(2), Calls()
    with rrfp.local(actual, loss_fn=loss_fn).blocking() as pipe, calls:
        pipe.step(batch.inputs, batch.targets)
        pipe.evaluate(batch.inputs)
    expect(expected, batch)
    assert largest_difference(actual, expected) < TOLERANCE
    assert calls.count == 0
    (message,) = caplog.messages
    assert "saved-tensor hooks" in message
    assert "inside the module's forward" in message
