"""`DoubleDevice`: who reads too early reads garbage, and the races that it reports."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from testing.endless import device, is_garbage
from torch import nn

from rrfp.lab.device_double import DoubleDevice

__all__ = ["device"]


def test_results_are_garbage_until_the_device_has_run_the_block() -> None:
    with DoubleDevice(0.05) as device:
        stream = device.stream()
        with stream.issuing():
            x = torch.ones(3) * 2
            n = torch.arange(3)
        assert is_garbage(x)
        assert is_garbage(n)
        stream.record().synchronize()
        assert x.tolist() == [2, 2, 2]
        assert n.tolist() == [0, 1, 2]
        assert device.problems == []


def test_blocks_of_one_stream_see_each_others_results(device: DoubleDevice) -> None:
    stream, x = device.stream(), torch.zeros(3)
    view = x[1:]
    with stream.issuing():
        x += 1
    with stream.issuing():
        view *= 5
        y = x + 1
        seen = y.clone().tolist()
    assert seen == [2, 6, 6]
    assert is_garbage(x)
    device.close()
    assert (x.tolist(), y.tolist()) == ([1, 5, 5], [2, 6, 6])
    assert device.problems == []


def test_a_forward_and_a_backward_of_a_module_are_covered_and_come_back(device: DoubleDevice) -> None:
    torch.manual_seed(0)
    norm, x, stream = nn.BatchNorm1d(3), torch.randn(4, 3), device.stream()
    module = nn.Sequential(nn.Linear(3, 3), norm)
    expected = torch.autograd.grad(module(x).square().sum(), tuple(module.parameters()))
    norm.reset_running_stats()
    with stream.issuing():
        loss = module(x).square().sum()
    with stream.issuing():
        loss.backward()
    assert is_garbage(loss.detach())
    assert all(is_garbage(p.grad) for p in module.parameters() if p.grad is not None)
    assert norm.running_mean is not None
    assert is_garbage(norm.running_mean)
    device.close()
    assert all(torch.equal(p.grad, g) for p, g in zip(module.parameters(), expected, strict=True) if p.grad is not None)
    assert device.problems == []


def test_the_order_of_an_event_lets_another_stream_read(device: DoubleDevice) -> None:
    first, second = device.stream(), device.stream()
    with first.issuing():
        x = torch.ones(3)
    event = first.record()
    with first.issuing():
        later = torch.ones(3)
    second.wait(event)
    with second.issuing():
        assert (x + 1).tolist() == [2, 2, 2]
        assert device.problems == []
        assert is_garbage(later)
    assert "and does not wait" not in "".join(device.problems)


def test_order_is_transitive(device: DoubleDevice) -> None:
    streams = [device.stream() for _ in range(3)]
    with streams[0].issuing():
        x = torch.ones(3)
    for before, after in pairwise(streams):
        after.wait(before.record())
    with streams[2].issuing():
        assert x.tolist() == [1, 1, 1]
    assert device.problems == []


def test_a_missing_event_between_streams_is_found(device: DoubleDevice) -> None:
    first, second = device.stream(), device.stream()
    with first.issuing():
        x = torch.ones(3)
    with second.issuing():
        y = x + 1
    device.close()
    assert is_garbage(y)
    (problem,) = device.problems
    assert "aten.add.Tensor reads 12 bytes that MainThread's work 1 on stream 0 writes, without waiting" in problem


def test_a_write_under_a_pending_read_of_another_stream_is_found(device: DoubleDevice) -> None:
    x, first, second = torch.ones(3), device.stream(), device.stream()
    with first.issuing():
        x + 1
    with second.issuing():
        x.zero_()
    (problem,) = device.problems
    assert "aten.zero_.default writes 12 bytes that MainThread's work 1 on stream 0 reads" in problem


def test_freed_input_is_found() -> None:
    with DoubleDevice(0.02) as device:
        x, stream = torch.ones(3), device.stream()
        with stream.issuing():
            y = x + 1
        del x
        stream.record().synchronize()
        (problem,) = device.problems
        assert "12 bytes that it reads (aten.add.Tensor) were freed before it was complete" in problem
        del y


def test_noted_input_may_be_freed() -> None:
    with DoubleDevice(0.02) as device:
        x, stream = torch.ones(3), device.stream()
        with stream.issuing():
            device.note_use(x, stream)
            y = x + 1
        del x
        stream.record().synchronize()
        assert device.problems == []
        del y


def free_input(device: DoubleDevice, between: Callable[[Any, Any], None]) -> None:
    """``reader`` uses memory that ``maker`` made, it is freed, ``between`` happens, and ``maker`` makes more."""
    maker, reader = device.stream(), device.stream()
    with maker.issuing():
        x = torch.ones(3)
    reader.wait(maker.record())
    with reader.issuing():
        x + 1
    del x
    between(maker, reader)
    with maker.issuing():
        torch.ones(3)


def test_memory_freed_to_a_stream_that_uses_it_too_early_is_found(device: DoubleDevice) -> None:
    free_input(device, lambda maker, reader: None)
    (problem,) = device.problems
    assert "MainThread's work 1 on stream 1: 12 bytes that it reads (aten.add.Tensor) were freed" in problem


def test_memory_freed_to_a_stream_that_waits_for_the_reader_is_no_problem(device: DoubleDevice) -> None:
    free_input(device, lambda maker, reader: maker.wait(reader.record()))
    assert device.problems == []


@pytest.mark.parametrize("is_noted", [False, True])
def test_memory_made_outside_blocks_and_freed_too_early_is_found(is_noted: bool, device: DoubleDevice) -> None:
    """As memory for a copy that another device makes."""
    x, reader = device.empty(torch.ones(3)), device.stream()
    with reader.issuing():
        if is_noted:
            device.note_use(x, reader)
        x + 1
    del x
    device.close()
    problem = "12 bytes that it reads (aten.add.Tensor) were freed before it was complete, without note_use"
    assert [line.partition(": ")[2] for line in device.problems] == ([] if is_noted else [problem])


def test_written_input_is_found() -> None:
    with DoubleDevice(0.02) as device:
        x, stream = torch.ones(3), device.stream()
        with stream.issuing():
            x + 1
        x.fill_(7)
        stream.record().synchronize()
        (problem,) = device.problems
        assert "12 bytes that it reads (aten.add.Tensor) were written to before it was complete" in problem


def test_an_output_written_by_the_host_is_found() -> None:
    with DoubleDevice(0.02) as device:
        x, stream = torch.ones(3), device.stream()
        with stream.issuing():
            x.add_(1)
        x.fill_(7)
        stream.record().synchronize()
        (problem,) = device.problems
        assert "12 bytes were written to by the host before the work that writes them was complete" in problem


def test_slow_work_of_a_caller(device: DoubleDevice) -> None:
    x, stream = torch.zeros(3), device.stream()
    with device.current_stream().issuing():
        x.fill_(3)
    assert is_garbage(x)
    stream.wait(device.current_stream().record())
    with stream.issuing():
        assert x.tolist() == [3, 3, 3]
    assert device.problems == []


def test_every_thread_has_a_current_stream_of_its_own(device: DoubleDevice) -> None:
    own, others = device.current_stream(), []
    thread = threading.Thread(target=lambda: others.append(device.current_stream()))
    thread.start()
    thread.join()
    assert device.current_stream() is own
    assert others[0] is not own
    stream = device.stream()
    with stream.issuing():
        assert device.current_stream() is stream
    assert device.current_stream() is own
