"""Blocks of work on the device double: events in them, nesting, failures, sizes and counts."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from testing.endless import device, is_garbage
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rrfp.errors import ConfigError
from rrfp.lab.device_double import DoubleDevice, DoubleError

__all__ = ["device"]


def test_events_in_a_block_split_it() -> None:
    with DoubleDevice(0.01) as device:
        stream = device.stream()
        with stream.issuing():
            before = stream.record(is_timed=True)
            x = torch.ones(3)
            middle = stream.record(is_timed=True)
            y = x + 1
        end = stream.record(is_timed=True)
        end.synchronize()
        assert middle.seconds_since(before) >= 0.01 - 1e-9
        assert end.seconds_since(before) >= 0.02 - 1e-9
        assert y.tolist() == [2, 2, 2]
        assert device.problems == []


def test_a_block_that_leaves_another_stream_current_waits_for_it(device: DoubleDevice) -> None:
    stream, side = device.stream(), device.stream()
    with stream.issuing():
        side.make_current()  # type: ignore[attr-defined]
        x = torch.ones(3)
    assert stream.strayed
    with stream.issuing():
        assert x.tolist() == [1, 1, 1]
    assert device.problems == []


def test_a_block_in_a_block_sees_only_its_own_streams_work(device: DoubleDevice) -> None:
    stream, side = device.stream(), device.stream()
    with stream.issuing():
        x = torch.ones(3)
        with side.issuing():
            assert is_garbage(x)
        assert x.tolist() == [1, 1, 1]
        with pytest.raises(RuntimeError, match="not reentrant"), stream.issuing():
            pass
    assert not stream.strayed
    assert "without waiting" in device.problems[0]


def test_a_failure_is_late_and_sticky() -> None:
    with DoubleDevice(0.01) as device:
        stream, other = device.stream(), device.stream()
        device.fail(after=2)
        with stream.issuing():
            torch.ones(3)
        good = stream.record()
        with stream.issuing():
            torch.ones(3)
        bad = stream.record()
        good.synchronize()
        for _ in range(2):
            with pytest.raises(DoubleError, match=r"work 2 on stream 0 failed on the device"):
                bad.synchronize()
        good.synchronize()
        with pytest.raises(DoubleError), other.issuing():
            pass
        for call in (other.record, lambda: other.wait(good)):
            with pytest.raises(DoubleError):
                call()


def test_staged_copies(device: DoubleDevice) -> None:
    out, back = device.stream(), device.stream()
    with out.issuing():
        x = torch.ones(3)
        host = device.empty_on_host(x)
        host.copy_(x, non_blocking=True)
    assert device.holds(x)
    assert not device.holds(host)
    assert not device.holds(host[1:])
    assert is_garbage(host)
    back.wait(out.record())
    with back.issuing():
        received = device.empty(x)
        received.copy_(host, non_blocking=True)
    assert device.holds(received)
    del host  # its pool keeps it from reuse until both copies are done
    device.close()
    assert received.tolist() == [1, 1, 1]
    assert device.problems == []


def test_memory_is_counted() -> None:
    with DoubleDevice(0) as device:
        stream = device.stream()
        with stream.issuing():
            x = torch.ones(256)
            y = x + 1
        kept = device.empty(x)
        stream.record().synchronize()
        assert device.memory().allocated == 3 * 1024
        del y, kept
        assert (device.memory().allocated, device.memory().peak) == (1024, 3 * 1024)


def test_misuse_of_events_is_found(device: DoubleDevice) -> None:
    stream = device.stream()
    with stream.issuing():
        torch.ones(3)
    early = stream.record(is_timed=True)
    early.seconds_since(early)
    assert device.problems == ["an event was asked for its time before it was reached"] * 2
    device.problems.clear()
    early.release()
    stream.wait(early)
    assert device.problems == ["an event was waited for after its release"]


def test_sparse_gradients_and_numbers_from_python(device: DoubleDevice) -> None:
    stream, table = device.stream(), nn.Embedding(5, 2, sparse=True)
    with stream.issuing():
        table(torch.tensor([1, 1])).sum().backward()
    assert table.weight.grad is not None
    assert is_garbage(table.weight.grad._values())
    device.close()
    assert table.weight.grad.to_dense()[1].tolist() == [2, 2]
    assert device.problems == []


def test_seconds_may_differ_by_block() -> None:
    with DoubleDevice(lambda n: n / 100) as device:
        stream = device.stream()
        events = [stream.record(is_timed=True)]
        for _ in range(2):
            with stream.issuing():
                torch.ones(3)
            events.append(stream.record(is_timed=True))
        events[-1].synchronize()
        assert events[1].seconds_since(events[0]) >= 0.01 - 1e-9
        assert events[2].seconds_since(events[1]) == pytest.approx(0.02)
    with pytest.raises(ConfigError, match="seconds is -1"):
        DoubleDevice(-1)


@pytest.mark.filterwarnings("error")
def test_tensors_without_memory_are_left_alone(device: DoubleDevice) -> None:
    """DTensor finds shapes with such tensors, also inside tasks."""
    stream = device.stream()
    with stream.issuing(), FakeTensorMode():
        torch.ones(3) + 1
    with stream.issuing():
        torch.empty(3, device="meta") + 1
    device.close()
    assert device.problems == []
    assert device.memory().peak == 0


def test_an_event_without_a_time_is_not_asked_for_it(device: DoubleDevice) -> None:
    event = device.stream().record()
    event.synchronize()
    event.seconds_since(event)
    assert device.problems == ["an event was asked for its time that was recorded without"] * 2
    device.problems.clear()


def broken_device(*, everywhere: bool = False) -> tuple[DoubleDevice, list[torch.Tensor]]:
    """A device that has failed, with memory that its streams have used and memory for copies."""
    device = DoubleDevice(0.0)
    stream, noted = device.stream(), torch.ones(8)
    with stream.issuing():
        noted + 1
    device.note_use(noted, stream)
    memory = [noted, device.empty_on_host(torch.ones(16))]
    device.fail(everywhere=everywhere)
    with stream.issuing():
        torch.ones(3)
    with pytest.raises(DoubleError):
        stream.record().synchronize()
    return device, memory


@pytest.mark.parametrize("keeps", [False, True])
def test_memory_that_a_failed_device_cannot_free_is_found_unless_it_is_kept(keeps: bool) -> None:
    device, memory = broken_device()
    if keeps:
        device.keep_noted()
    memory.clear()
    device.close()
    freed = [f"{size} bytes of noted memory were freed after the device had failed" for size in (32, 64)]
    assert device.problems == ([] if keeps else freed)


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_failure_may_reach_every_call(everywhere: bool) -> None:
    with broken_device(everywhere=everywhere)[0] as device:
        device.keep_noted()
        assert not device.pin(torch.ones(3))
        for make in (device.empty, device.empty_on_host):
            with pytest.raises(DoubleError) if everywhere else nullcontext():
                make(torch.ones(3))


def test_calls_may_hold_the_interpreters_lock() -> None:
    with DoubleDevice(0.0, locked_s=0.05) as device:
        stream, counts = device.stream(), []
        ended = threading.Event()

        def count() -> None:
            while not ended.is_set():
                counts.append(time.monotonic())

        thread = threading.Thread(target=count)
        thread.start()
        stream.record()
        ended.set()
        thread.join()
        assert max(b - a for a, b in pairwise(counts)) >= 0.04
