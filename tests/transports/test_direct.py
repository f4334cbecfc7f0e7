"""A shortcut that would pass a derived class's own ``send`` or ``receive`` by is not used."""

from __future__ import annotations

from rrfp.transports.base import Message, Transport, TransportContext
from rrfp.transports.direct import delivering, sending_at_once
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
