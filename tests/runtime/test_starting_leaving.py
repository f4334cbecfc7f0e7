"""Starting, leaving, and giving up: bounded in time, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from typing import Any

import pytest
from runtime.ranks import BATCH, SOON_S, ThreadedRanks, two_steps
from runtime.toys import Bomb, Hold, data, loss_fn, stages

import rrfp
from rrfp.errors import PipelineAborted, RrfpError, TransportError
from rrfp.transports.base import Message, MessageKind, TransportContext
from rrfp.transports.inproc import InprocTransport
from rrfp.transports.rendezvous import LocalRendezvous


class LateResult(InprocTransport):
    """On stage 1 the first RESULT arrives only after the first output of the next step."""

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        self._late: Message | None = None
        self._next: list[Message] = []

    async def receive(self) -> Message:
        if self._next:
            return self._next.pop(0)
        message = await super().receive()
        if self.context.rank == 1 and message.kind is MessageKind.RESULT and self._late is None:
            self._late = message
            overtaking = await super().receive()
            assert overtaking.kind is MessageKind.OUTPUT
            self._next = [self._late]
            return overtaking
        return message


def test_an_output_may_overtake_the_end_of_the_step_before() -> None:
    outcomes = ThreadedRanks(stages(2), two_steps, transport=LateResult).join()
    assert [outcome.error for outcome in outcomes] == [None, None]


class NoStart(InprocTransport):
    """On stage 1 it does not start."""

    async def start(self) -> None:
        if self.context.rank == 1:
            raise TransportError("no network here")
        await super().start()


def test_a_rank_that_cannot_start_frees_the_others_of_its_process() -> None:
    began = time.monotonic()
    with pytest.raises(TransportError, match="no network here"), rrfp.local(stages(3), transport=NoStart).blocking():
        pass
    assert time.monotonic() - began < SOON_S


async def test_a_rank_that_cannot_start_frees_the_others_of_its_loop() -> None:
    with pytest.raises(TransportError, match="no network here"):
        async with rrfp.local(stages(3), transport=NoStart, loop="caller"):
            pass


def test_a_peer_that_does_not_come_is_named() -> None:
    modules = stages(2)
    pipeline = rrfp.Pipeline(
        modules[0],
        topology=rrfp.Topology(0, 2),
        rendezvous=LocalRendezvous(),
        transport="inproc",
        connect_timeout=0.2,
    )
    with pytest.raises(TransportError, match="stage 1 did not come"), pipeline.blocking():
        pass


class Stuck(InprocTransport):
    """Never finishes closing."""

    async def close(self) -> None:
        await asyncio.get_running_loop().create_future()


def test_leaving_is_bounded_when_a_transport_cannot_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rrfp.timeouts.RUNNER_CLOSE_S", 0.2)
    began = time.monotonic()
    with rrfp.local(stages(2), loss_fn=loss_fn, transport=Stuck).blocking() as pipe:
        pipe.step(BATCH.inputs, BATCH.targets)
    assert time.monotonic() - began < SOON_S + 0.2


@pytest.mark.parametrize("loop", ["own", "caller"])
async def test_leaving_during_a_step_ends_it_with_an_error_that_says_so(loop: Any) -> None:
    hold = Hold()
    async with rrfp.local([*stages(1), Bomb(hold)], loss_fn=loss_fn, loop=loop) as pipe:
        stepping = asyncio.create_task(pipe.step(BATCH.inputs, BATCH.targets))
        await asyncio.to_thread(hold.begun.wait)
    hold.release.set()
    with pytest.raises(PipelineAborted, match="the pipeline was left while a step was running"):
        await asyncio.wait_for(stepping, SOON_S)
    with pytest.raises(RrfpError, match="closed"):
        await pipe.step(BATCH.inputs, BATCH.targets)


class Blocking(rrfp.Hint):
    """Breaks the rule that a hint waits for nothing."""

    def choose(self, ready: rrfp.ReadySet, view: rrfp.View) -> rrfp.Task | None:
        RELEASE.wait(30)
        return next(iter(ready))


RELEASE = threading.Event()


@pytest.mark.allow_blocking(reason="the hint under test does")
async def test_leaving_is_bounded_when_a_hint_blocks_the_loop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rrfp.timeouts.LEAVE_S", 0.1)
    monkeypatch.setattr("rrfp.timeouts.JOIN_S", 0.1)
    began = time.monotonic()
    try:
        with pytest.raises(TimeoutError):
            async with rrfp.local(stages(1), loss_fn=loss_fn, hint=Blocking()) as pipe:
                await asyncio.wait_for(pipe.step(BATCH.inputs, BATCH.targets), 0.1)
        assert time.monotonic() - began < SOON_S
        (loops_thread,) = (thread for thread in threading.enumerate() if thread.name == "rrfp-local")
        RELEASE.set()
        loops_thread.join(10)
        gc.collect()
        assert "never retrieved" not in caplog.text  # as asyncio logs an error that no one has read
    finally:
        RELEASE.set()


def test_ctrl_c_in_an_async_program_ends_it_and_is_no_hang() -> None:
    """asyncio.run cancels the program at Ctrl-C, and raises KeyboardInterrupt once it has ended."""
    hold, batch = Hold(), data(2)

    async def program() -> None:
        async with rrfp.local([*stages(1), Bomb(hold)], loss_fn=loss_fn) as pipe:
            await pipe.step(batch.inputs, batch.targets)

    def interrupt() -> None:
        hold.begun.wait(10)
        os.kill(os.getpid(), signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(program())
    assert time.monotonic() - began < SOON_S
    interrupter.join()
    hold.release.set()


def test_leaving_twice_does_nothing_more() -> None:
    pipeline = rrfp.local(stages(2), loss_fn=loss_fn)
    with pipeline as pipe:
        pipe.step(BATCH.inputs, BATCH.targets)
        pipe.__exit__(None, None, None)
    pipeline.__exit__(None, None, None)
    with pytest.raises(RrfpError, match=r"this pipeline is closed$"):
        pipe.step(BATCH.inputs, BATCH.targets)


@pytest.mark.parametrize("loop", ["own", "caller"])
async def test_leaving_twice_does_nothing_more_where_it_is_awaited(loop: Any) -> None:
    pipeline = rrfp.local(stages(2), loss_fn=loss_fn, loop=loop)
    async with pipeline as pipe:
        await pipe.step(BATCH.inputs, BATCH.targets)
        await pipe.__aexit__(None, None, None)
    await pipeline.__aexit__(None, None, None)


async def test_leaving_what_was_not_entered_is_one_error() -> None:
    pipeline = rrfp.local(stages(1))
    with pytest.raises(RrfpError, match="this pipeline is new; enter it first"):
        pipeline.__exit__(None, None, None)
    with pytest.raises(RrfpError, match="this pipeline is new; enter it first"):
        await pipeline.__aexit__(None, None, None)
