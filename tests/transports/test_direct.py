"""Which shortcuts of a transport are used, and an error of who takes messages."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
import transports.makers as makers

from rrfp.errors import RrfpError
from rrfp.testing.transport_checks import PairOptions
from rrfp.testing.transport_checks.pair import index_of, note, soon
from rrfp.transports.base import Message, Transport, TransportContext, delivering, sending_at_once
from rrfp.transports.inproc import InprocTransport
from rrfp.transports.rendezvous import LocalRendezvous
from rrfp.transports.shm.transport import ShmTransport
from rrfp.transports.zmq.transport import ZmqTransport


class Delayed(ZmqTransport):
    async def send(self, peer: int, message: Message) -> None:
        await super().send(peer, message)


class Counted(Delayed):
    def send_at_once(self, peer: int, message: Message) -> bool:
        return super().send_at_once(peer, message)


class Logged(ZmqTransport):
    async def receive(self) -> Message:
        return await super().receive()


def made(kind: type[Transport]) -> Transport:
    return kind(TransportContext(0, (1,), "run", LocalRendezvous()))


def test_a_transport_offers_its_shortcuts() -> None:
    for kind in (ZmqTransport, ShmTransport):
        transport = made(kind)
        assert sending_at_once(transport) is not None
        assert delivering(transport) is not None


def test_a_transport_without_shortcuts_offers_none() -> None:
    transport = made(InprocTransport)
    assert sending_at_once(transport) is None
    assert delivering(transport) is None


def test_a_class_that_changes_send_alone_gets_every_message_through_it() -> None:
    transport = made(Delayed)
    assert sending_at_once(transport) is None
    assert delivering(transport) is not None


def test_a_class_that_changes_both_ways_of_sending_is_used_both_ways() -> None:
    transport = made(Counted)
    assert sending_at_once(transport) is not None


def test_a_class_that_changes_receive_alone_gets_every_message_through_it() -> None:
    transport = made(Logged)
    assert delivering(transport) is None
    assert sending_at_once(transport) is not None


@pytest.mark.parametrize("name", ["shm", "zmq-ipc", "collective"])
async def test_an_error_of_who_takes_messages_does_not_hold_up_those_behind_it(name: str) -> None:
    """It breaks the contract, and is the loop's to report."""
    reported: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))
    taken: asyncio.Queue[int] = asyncio.Queue()

    def take(entry: Message | RrfpError) -> None:
        assert isinstance(entry, Message)
        taken.put_nowait(index_of(entry))
        if index_of(entry) == 0:
            raise ValueError("a mistake")

    async with makers.MAKERS[name](PairOptions()) as pair:
        cast(Any, pair.right).deliver_to(take)
        for index in range(3):
            await pair.left.send(1, note(index))
        assert [await soon(taken.get(), "it is delivered") for _ in range(3)] == [0, 1, 2]
    assert [str(error) for error in reported] == ["a mistake"]
