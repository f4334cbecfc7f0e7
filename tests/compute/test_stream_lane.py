"""`StreamLane` over the device double: its clocks, broken devices and several lanes."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

from rrfp.compute.lanes.stream import StreamLane, narrowed
from rrfp.errors import ConfigError
from rrfp.lab.device_double import DoubleDevice, DoubleError


@pytest.fixture
async def device() -> AsyncIterator[DoubleDevice]:
    device = DoubleDevice(0.01)
    yield device
    await asyncio.to_thread(device.close)


@pytest.fixture
async def lane(device: DoubleDevice) -> AsyncIterator[StreamLane]:
    lane = StreamLane(device)
    lane.start()
    yield lane
    lane.close()


async def error_of(future: asyncio.Future[Any]) -> BaseException | None:
    await asyncio.wait([future])
    return future.exception()


@pytest.mark.parametrize("depth", [0, -1, 1.5, True])
def test_depth_that_is_no_positive_number_is_refused(depth: Any) -> None:
    with pytest.raises(ConfigError, match="must be a whole number >= 1"):
        StreamLane(DoubleDevice(), depth=depth)


async def test_times_are_the_devices(lane: StreamLane) -> None:
    first, second = lane.enqueue(lambda: torch.ones(3)), lane.enqueue(lambda: torch.ones(3))
    one, two = await first, await second
    assert one.ended - one.started >= 0.01 - 1e-6
    assert two.started >= one.ended
    assert two.launched is not None
    assert two.launched < two.ended


@pytest.mark.parametrize(
    ("least", "most", "expected"), [(0.0, 9.0, 5.0), (0.0, 4.0, 4.0), (6.0, 9.0, 6.0), (6.0, 4.0, 6.0)]
)
def test_what_the_host_has_seen_narrows_the_time_of_a_base(least: float, most: float, expected: float) -> None:
    assert narrowed(5.0, least=least, most=most) == expected


async def test_a_fence_that_the_device_refuses_fails_later_calls(lane: StreamLane, device: DoubleDevice) -> None:
    """Without the fence they would compute with inputs that are not there yet."""
    await lane.enqueue(lambda: None)
    refused = DoubleError("refused")
    with patch.object(device, "current_stream", side_effect=refused):
        lane.fence()
    for _ in range(2):
        assert await error_of(lane.enqueue(lambda: None)) is refused


async def test_a_wait_that_the_device_refuses_fails_later_calls(lane: StreamLane, device: DoubleDevice) -> None:
    await lane.enqueue(lambda: None)
    refused = DoubleError("refused")
    with patch.object(type(device.stream()), "wait", side_effect=refused):
        lane.fence()
        assert await error_of(lane.enqueue(lambda: None)) is refused


async def test_after_an_error_of_python_the_device_goes_on(lane: StreamLane) -> None:
    def fail() -> None:
        torch.ones(3)
        raise ValueError("in Python")

    assert isinstance(await error_of(lane.enqueue(fail)), ValueError)
    assert (await lane.enqueue(lambda: torch.ones(3))).result.tolist() == [1, 1, 1]


async def test_a_call_that_raises_on_a_device_that_fails_late_is_not_the_one_named(
    lane: StreamLane, device: DoubleDevice
) -> None:
    device.fail()
    at_fault, surfaced = lane.enqueue(lambda: torch.ones(3)), lane.enqueue(lambda: 1 // 0)
    first = await error_of(at_fault)
    assert isinstance(first, DoubleError)
    assert await error_of(surfaced) is first


async def test_an_error_in_python_does_not_wait_for_a_device_that_hangs() -> None:
    device = DoubleDevice(1e6)
    lane = StreamLane(device)
    lane.start()
    hanging = lane.enqueue(lambda: torch.ones(3))
    with patch("rrfp.timeouts.DEVICE_VERDICT_S", 0.01):
        assert isinstance(await error_of(lane.enqueue(lambda: 1 // 0)), ZeroDivisionError)
    assert not hanging.done()
    lane.close()
    await asyncio.to_thread(device.close)


async def test_stack_says_where_a_call_is() -> None:
    device = DoubleDevice(1e6)  # which completes nothing
    lane = StreamLane(device)
    lane.start()
    assert lane.stack() == ""
    begun, released = threading.Event(), threading.Event()

    def call() -> torch.Tensor:
        begun.set()
        released.wait()
        return torch.ones(3)

    lane.enqueue(call)
    await asyncio.to_thread(begun.wait)
    assert "released.wait()" in lane.stack()
    released.set()
    async with asyncio.timeout(20):
        while lane.stack() != f"the call has returned, and {device.name} has not completed its work":  # noqa: ASYNC110 - no event says so
            await asyncio.sleep(0)
    lane.close()
    await asyncio.to_thread(device.close)


async def test_a_lane_without_calls_has_no_stack(lane: StreamLane) -> None:
    await lane.enqueue(lambda: torch.ones(3))
    assert lane.stack() == ""


async def test_a_module_that_leaves_another_stream_current_is_named_once(
    lane: StreamLane, device: DoubleDevice, caplog: pytest.LogCaptureFixture
) -> None:
    side = device.stream()

    def stray() -> Any:
        side.make_current()  # type: ignore[attr-defined]
        return torch.ones(3)

    with caplog.at_level(logging.WARNING):
        results = [(await lane.enqueue(stray)).result for _ in range(2)]
    assert [result.tolist() for result in results] == [[1, 1, 1]] * 2
    (record,) = caplog.records
    assert f"a module left another stream of {device.name} current" in record.getMessage()
    assert device.problems == []


async def test_memory_of_the_host_is_not_adopted(lane: StreamLane, device: DoubleDevice) -> None:
    with patch.object(device, "note_use") as note_use:
        lane.adopt([device.empty_on_host(torch.ones(3)), torch.ones(3, device="meta")])
    note_use.assert_not_called()


async def test_two_lanes_of_one_device_see_each_others_results_only_when_complete() -> None:
    device = DoubleDevice(lambda count: 0.0 if count < 3 else 60.0)  # the third block ends when the device is closed
    lanes = [StreamLane(device) for _ in range(2)]
    for lane in lanes:
        lane.start()
    x = (await lanes[0].enqueue(lambda: torch.ones(3))).result
    y = (await lanes[1].enqueue(lambda: x + 1)).result
    assert y.tolist() == [2, 2, 2]
    assert device.problems == []
    made: list[torch.Tensor] = []
    first = lanes[0].enqueue(lambda: made.append(torch.ones(3)))
    await issued(lanes[0])
    early = lanes[1].enqueue(partial(torch.add, made[0], 1))
    await issued(lanes[1])
    await asyncio.to_thread(device.close)
    await asyncio.gather(first, early)
    for lane in lanes:
        lane.close()
    assert bool(early.result().result.isnan().all())
    assert len(device.problems) == 1


async def issued(lane: StreamLane) -> None:
    """Wait until all calls of the lane have returned and their blocks are left; the device may be at work on them."""
    has_begun = threading.Event()
    lane.enqueue(has_begun.set)
    await asyncio.to_thread(has_begun.wait)
    # Within its block the call before is visible, and to other threads as well.
    while not lane.stack().startswith("the call has returned"):  # noqa: ASYNC110 - no event says so
        await asyncio.sleep(0)


async def test_a_closed_lane_is_not_over_before_the_device_has_completed_its_work() -> None:
    device = DoubleDevice(lambda count: 60.0)  # the block ends when the device is closed
    lane = StreamLane(device, is_timed=False)
    lane.start()
    lane.enqueue(lambda: torch.ones(3))
    await issued(lane)
    lane.close()
    assert lane._thread is not None
    await asyncio.to_thread(lane._thread.join, 0.05)
    assert not lane.is_over
    await asyncio.to_thread(device.close)
    await asyncio.to_thread(lane._thread.join, 10)
    assert lane.is_over


async def test_without_times_of_the_device_a_call_has_those_of_the_host(device: DoubleDevice) -> None:
    lane = StreamLane(device, is_timed=False)
    lane.start()
    before = lane.now()
    execution = await lane.enqueue(lambda: torch.ones(3))
    assert execution.launched is not None
    assert before <= execution.started <= execution.launched <= execution.ended <= lane.now()
    assert execution.ended - execution.started >= 0.01 - 1e-6
    lane.close()
    assert device.problems == []


class KeepsNothing(DoubleDevice):
    def keep_noted(self) -> None: ...


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("make", [DoubleDevice, KeepsNothing])
async def test_what_calls_have_adopted_is_kept_from_a_device_that_has_failed(
    make: type[DoubleDevice], everywhere: bool
) -> None:
    device = make(0.001)
    lane = StreamLane(device)
    lane.start()
    received = [torch.ones(8)]

    def use() -> torch.Tensor:
        lane.adopt(received)
        return received[0] + 1

    device.fail(everywhere=everywhere)
    assert isinstance(await error_of(lane.enqueue(use)), DoubleError)
    assert isinstance(await error_of(lane.enqueue(use)), DoubleError)
    received.clear()
    lane.close()
    await asyncio.to_thread(device.close)
    freed = ["32 bytes of noted memory were freed after the device had failed"]
    assert device.problems == (freed if make is KeepsNothing else [])


def suppressed(call: Callable[[], None]) -> BaseException | None:
    try:
        call()
    except Exception as error:
        return error
    return None


async def test_a_fence_that_fails_keeps_what_was_adopted(device: DoubleDevice) -> None:
    lane = StreamLane(device)
    lane.start()
    device.fail()
    with device.stream().issuing():
        torch.ones(3)
        end = device.current_stream().record()
    assert isinstance(await asyncio.to_thread(lambda: suppressed(end.synchronize)), DoubleError)
    with patch.object(device, "keep_noted") as keep_noted:
        lane.fence()
    keep_noted.assert_called()
    lane.close()
