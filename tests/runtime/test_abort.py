"""A rank's one failure: the first that happens is the one that everybody is told."""

from __future__ import annotations

import asyncio

import pytest

from rrfp.core.topology import Topology
from rrfp.errors import Origin, PipelineAborted
from rrfp.runtime.abort import Lifeline
from rrfp.runtime.failure import Failure
from rrfp.transports.base import TransportContext
from rrfp.transports.inproc import InprocTransport
from rrfp.transports.rendezvous import LocalRendezvous

ELSEWHERE = Failure(Origin(1, None, "ValueError: second"))


async def lifeline(stopped: list[Failure]) -> Lifeline:
    transport = InprocTransport(TransportContext(0, (), "run", LocalRendezvous()))
    await transport.start()
    return Lifeline(Topology(0, 2), transport, stopped.append)


async def test_of_two_failures_the_first_is_told_although_nobody_was_told_before_the_second() -> None:
    stopped: list[Failure] = []
    life = await lifeline(stopped)
    life.fail(ValueError("first"))
    life.abort(ELSEWHERE)
    life.fail(ValueError("third"))
    for tell in (life.tell, life.check):
        with pytest.raises(PipelineAborted) as caught:
            tell()
        assert caught.value.origin == Origin(0, None, "ValueError: first")
    assert [failure.origin.cause for failure in stopped] == ["ValueError: first"]
    await life.end()


async def test_a_waiting_caller_is_told_the_first_of_two_failures_that_come_before_its_turn() -> None:
    life = await lifeline([])

    async def for_ever() -> None:
        await asyncio.get_running_loop().create_future()

    waiting = asyncio.create_task(life.unless_aborted(for_ever(), "the step"))
    await asyncio.sleep(0)
    assert life.is_awaited
    life.fail(ValueError("first"))
    life.abort(ELSEWHERE)
    with pytest.raises(PipelineAborted, match="stage 0: ValueError: first"):
        await waiting
    await life.end()


async def test_what_was_told_is_not_told_again_by_leaving() -> None:
    life = await lifeline([])
    life.fail(ValueError("first"))
    with pytest.raises(PipelineAborted):
        life.check()
    life.tell()
    await life.end()
