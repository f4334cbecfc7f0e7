"""A pipeline as its user holds it, on a loop with a virtual clock: ``rrfp.local(..., loop="caller")``."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from functools import partial
from typing import Any

import pytest

import rrfp
from rrfp.errors import ConfigError, DeadlockError, Origin, PipelineAborted
from rrfp.lab.emulated import Durations
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Kind, Task
from rrfp.pipeline.faces import PipelineHandle
from rrfp.testing.clock import EmulatedStage, SimulatedTransport, TimerLane, run_virtual
from rrfp.transports.base import Message, MessageKind, TransportContext


def emulated(stages: int, durations: Durations, **options: Any) -> PipelineHandle:
    """A pipeline that computes nothing and takes its time on timers."""
    graph, lanes = TaskGraph.chain(stages), [TimerLane() for _ in range(stages)]
    programs = [EmulatedStage(graph, durations, num_bytes=8, spend=lane.spend) for lane in lanes]
    return rrfp.local(programs, loop="caller", **{"transport": "simulated", "lane": lanes.__getitem__, **options})


def one_second(task: Task) -> float:
    return 1.0


def test_a_step_takes_the_time_of_its_schedule_and_the_user_may_sleep_between() -> None:
    async def main() -> tuple[list[float], float]:
        async with emulated(3, one_second, strict="1f1b") as pipe:
            first = await pipe.step(microbatches=4)
            await asyncio.sleep(1000)  # the user's own work
            second = await pipe.step(microbatches=4)
            third = await pipe.evaluate(microbatches=4)
        return [first.seconds, second.seconds, third.seconds], asyncio.get_running_loop().time()

    # 1F1B takes (M + N - 1) x (F + B); forward only M + N - 1.
    assert run_virtual(main()) == ([12, 12, 6], 12 + 1000 + 12 + 6)


def test_latency_is_a_transport_like_any_other() -> None:
    def latency(stage: int, peer: int, message: Message) -> float:
        return 0.5 if message.kind is MessageKind.OUTPUT else 0.0

    async def main() -> float:
        async with emulated(2, one_second, transport=partial(SimulatedTransport, latency=latency)) as pipe:
            return (await pipe.step(microbatches=1)).seconds

    assert run_virtual(main()) == 1 + 0.5 + 1 + 1 + 0.5 + 1


class SlowWithOutputs(SimulatedTransport):
    """An output is on its way for 5 s; its memory is read for the first half second of these."""

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context, lambda stage, peer, message: 5.0 if message.kind is MessageKind.OUTPUT else 0.0)

    async def send(self, peer: int, message: Message) -> None:
        await super().send(peer, message)
        if message.kind is MessageKind.OUTPUT:
            await asyncio.sleep(0.5)


def test_a_forward_that_waits_for_bytes_starts_when_an_output_has_left_them() -> None:
    """There is room for one output of 8 bytes."""

    async def main() -> list[float]:
        async with emulated(2, one_second, transport=SlowWithOutputs, limit=rrfp.Limit(bytes=8)) as pipe:
            trace = (await pipe.step(microbatches=2)).trace
        return [span.start - trace.start for span in trace.tasks if (span.task.kind, span.stage) == (Kind.F, 0)]

    assert run_virtual(main()) == [0, 1.5]


def test_a_step_leaves_no_coroutine_behind() -> None:
    async def main() -> list[int]:
        alive = []
        async with emulated(2, one_second) as pipe:
            for _ in range(2):
                await (await pipe.step(microbatches=4)).complete()
                gc.collect()
                alive.append(sum(type(each) is asyncio.Task for each in gc.get_objects()))
        return alive

    assert len(set(run_virtual(main()))) == 1


class Deaf(rrfp.Hint):
    """Waits for ever on stage 1."""

    may_wait = True

    def choose(self, ready: rrfp.ReadySet, view: rrfp.View) -> rrfp.Task | None:
        return None if view.stage == 1 else next(iter(ready))


def test_a_deadlock_ends_every_rank_after_ten_virtual_seconds_and_real_milliseconds() -> None:
    async def main() -> tuple[PipelineAborted, float]:
        with pytest.raises(PipelineAborted) as caught:
            await deadlock()
        return caught.value, asyncio.get_running_loop().time()

    async def deadlock() -> None:
        async with emulated(4, one_second, hint=Deaf) as pipe:
            await pipe.step(microbatches=2)

    began = time.monotonic()
    error, when = run_virtual(main())
    assert time.monotonic() - began < 5
    assert isinstance(error.__cause__, DeadlockError)
    assert "deadlock in step 0: every rank is idle and nothing is in flight" in str(error)
    # Stage 0 is busy until 2; the watch looks every 2.5 s: stages 1 to 3 ask at 10, stage 0 answers for all.
    assert 10 <= when <= 15


def test_a_slow_task_is_named_and_nothing_ends(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)

    async def main() -> float:
        async with emulated(2, lambda task: 25.0 if task == Task(Kind.F, 0, 1) else 0.0) as pipe:
            return (await pipe.step(microbatches=1)).seconds

    assert run_virtual(main()) == 25
    lines = [line for line in caplog.messages if "has been running F0@1 for" in line]
    assert [line.split(":")[0] for line in lines] == [
        "stage 0 has been idle for 10 s",
        "stage 0 has been idle for 20 s",
    ]


def test_sizes_reach_the_hint_and_wrong_ones_are_refused() -> None:
    seen: list[Any] = []

    class Curious(rrfp.Hint):
        def choose(self, ready: rrfp.ReadySet, view: rrfp.View) -> rrfp.Task | None:
            seen.append(view.sizes)
            return next(iter(ready))

    async def main() -> None:
        async with emulated(1, one_second, hint=Curious) as pipe:
            await pipe.step(sizes=[3, 4.5])
            await pipe.evaluate(microbatches=2)
            with pytest.raises(ConfigError, match=r"sizes\[1\] is -1, must be a finite number >= 0"):
                await pipe.step(sizes=[1, -1])
            with pytest.raises(ConfigError, match=r"microbatches: 2, sizes: 1"):
                await pipe.step(microbatches=2, sizes=[1])

    run_virtual(main())
    assert set(seen) == {(3.0, 4.5), None}


def test_a_lane_is_made_by_a_callable() -> None:
    with pytest.raises(ConfigError, match=r"lane is 3, must be callable: lane\(stage\)"):
        emulated(1, one_second, lane=3)


def test_a_task_may_take_just_less_than_abort_after_and_no_more() -> None:
    async def main(limit: float) -> float:
        async with emulated(3, one_second, abort_after=limit) as pipe:
            await pipe.step(microbatches=4)
            await asyncio.sleep(1000)  # between steps nothing runs
            await pipe.step(microbatches=4)
        return asyncio.get_running_loop().time()

    assert run_virtual(main(1.01)) == 12 + 1000 + 12
    with pytest.raises(PipelineAborted) as caught:
        run_virtual(main(0.99))
    assert caught.value.origin.task == "F0@0"
    assert caught.value.origin.cause.startswith(
        "OverdueError: F0@0 has not completed for 1.0 s, longer than abort_after"
    )


class CannotSend(SimulatedTransport):
    """Has no way for one output."""

    async def send(self, peer: int, message: Message) -> None:
        if message.kind is MessageKind.OUTPUT and message.task == Task(Kind.F, 1, 0):
            raise OSError("gone")
        await super().send(peer, message)


def test_an_output_that_cannot_be_sent_is_named() -> None:
    async def main() -> None:
        async with emulated(2, one_second, transport=CannotSend) as pipe:
            await pipe.step(microbatches=3)

    with pytest.raises(PipelineAborted) as caught:
        run_virtual(main())
    assert caught.value.origin == Origin(0, "F1@0", "OSError: gone")
