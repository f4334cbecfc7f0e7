"""Blocks of work on the device double: events in them, nesting, failures, sizes and counts."""

from __future__ import annotations

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
            before = stream.record()
            x = torch.ones(3)
            middle = stream.record()
            y = x + 1
        end = stream.record()
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
    early = stream.record()
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
        events = [stream.record()]
        for _ in range(2):
            with stream.issuing():
                torch.ones(3)
            events.append(stream.record())
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
