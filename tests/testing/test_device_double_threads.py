"""`DoubleDevice` with several threads that issue work at the same time, each in blocks of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from testing.endless import device

from rrfp.lab.device_double import DoubleDevice, DoubleStream

__all__ = ["device"]

#: The most that a thread waits for another one.
PATIENCE_S = 10.0


@pytest.fixture
def elsewhere() -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Makes a call on another thread, and waits for it."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda call: pool.submit(call).result(PATIENCE_S)


def test_calls_on_two_streams_may_wait_for_each_other(device: DoubleDevice) -> None:
    """As collectives of two ranks do, or a copy that lets the peer of a running task go on."""
    both = threading.Barrier(2, timeout=PATIENCE_S)

    def call(value: float) -> Any:
        with device.stream().issuing():
            x = torch.full((3,), value)
            both.wait()
            y = x + 1
            both.wait()
            return y.tolist(), y

    with ThreadPoolExecutor(2) as pool:
        (first, x), (second, y) = pool.map(call, [1.0, 5.0])
    assert (first, second) == ([2, 2, 2], [6, 6, 6])
    assert x.isnan().all()
    assert y.isnan().all()
    device.close()
    assert (x.tolist(), y.tolist()) == ([2, 2, 2], [6, 6, 6])
    assert device.problems == []


def test_a_block_that_ends_covers_nothing_that_another_one_may_see(device: DoubleDevice, elsewhere: Any) -> None:
    maker, first, second = (device.stream() for _ in range(3))
    with maker.issuing():
        x = torch.ones(3)
    event = maker.record()
    first.wait(event)
    second.wait(event)

    def read() -> list[float]:
        with second.issuing():
            return (x + 1).tolist()

    with first.issuing():
        assert elsewhere(read) == [2, 2, 2]
        assert x.tolist() == [1, 1, 1]
    assert x.isnan().all()
    assert device.problems == []


READ, WRITE = (lambda x: x + 1), (lambda x: x.zero_())


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (READ, WRITE, "aten.zero_.default writes 12 bytes that MainThread's work 1 on stream 0 reads"),
        (WRITE, READ, "aten.add.Tensor reads 12 bytes that MainThread's work 1 on stream 0 writes"),
        (WRITE, WRITE, "aten.zero_.default reads 12 bytes that MainThread's work 1 on stream 0 writes"),
    ],
    ids=["read-write", "write-read", "write-write"],
)
def test_races_of_open_blocks_are_found(
    one: Callable[[Any], Any], other: Callable[[Any], Any], message: str, device: DoubleDevice, elsewhere: Any
) -> None:
    x, first, second = torch.ones(3), device.stream(), device.stream()

    def race() -> None:
        with second.issuing():
            other(x)

    with first.issuing():
        one(x)
        elsewhere(race)
    (problem,) = device.problems
    assert message in problem


def test_two_readers_are_no_race(device: DoubleDevice, elsewhere: Any) -> None:
    x, first, second = torch.ones(3), device.stream(), device.stream()

    def read() -> None:
        with second.issuing():
            x + 1

    with first.issuing():
        x + 1
        elsewhere(read)
    assert device.problems == []


def test_an_event_inside_an_open_block_orders_what_comes_before_it(device: DoubleDevice, elsewhere: Any) -> None:
    first, second = device.stream(), device.stream()
    with first.issuing():
        x = torch.ones(3)
        second.wait(first.record())

        def add() -> list[float]:
            with second.issuing():
                return x.add_(1).tolist()

        assert elsewhere(add) == [2, 2, 2]
        first.wait(second.record())
        assert x.tolist() == [2, 2, 2]
    assert device.problems == []


def test_blocks_of_one_stream_take_turns(device: DoubleDevice) -> None:
    stream, x, begun = device.stream(), torch.zeros(3), threading.Event()

    def add() -> None:
        begun.set()
        with stream.issuing():
            x.add_(1)

    thread = threading.Thread(target=add)
    with stream.issuing():
        thread.start()
        assert begun.wait(PATIENCE_S)
        thread.join(0.02)
        x.fill_(5)
    thread.join(PATIENCE_S)
    device.close()
    assert x.tolist() == [6, 6, 6]
    assert device.problems == []


def test_a_block_that_made_its_own_stream_current_again_waits_for_no_other(
    device: DoubleDevice, elsewhere: Any
) -> None:
    stream, side = device.stream(), device.stream()
    assert isinstance(stream, DoubleStream)
    assert isinstance(side, DoubleStream)
    with stream.issuing():
        side.make_current()
        x = torch.ones(3)
        stream.make_current()
        assert device.current_stream() is stream
        assert x.isnan().all()
    assert not stream.strayed
    (problem,) = device.problems
    assert "aten.isnan.default reads 12 bytes that MainThread's work 1 on stream 1 writes" in problem

    def use(free: DoubleStream) -> None:
        with free.issuing():
            pass

    for free in (stream, side):
        elsewhere(lambda free=free: use(free))
