"""Transport auto: what it chooses for each peer, that both ends choose the same, and what it says."""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transports.makers as makers
from fork_server import fork_server
from torch.distributed import FileStore  # type: ignore[attr-defined]
from transports.auto_children import RUN_ID, echo_in_new_pid_namespace
from transports.children import in_child

from rrfp import timeouts
from rrfp.errors import TransportClosedError, TransportError
from rrfp.testing.transport_checks import PairOptions
from rrfp.testing.transport_checks.pair import data, index_of, note, pass_on, receive, soon
from rrfp.transports.auto import AutoTransport, HostChoice, auto_transport, explain
from rrfp.transports.base import Transport, TransportContext
from rrfp.transports.inproc import InprocTransport
from rrfp.transports.links.flow import HomeLoop
from rrfp.transports.rendezvous import StoreRendezvous
from rrfp.transports.shm.transport import ShmTransport
from rrfp.transports.shm.trial import Host, obstacle_between, this_host
from rrfp.transports.zmq.transport import ZmqTransport

__all__ = ["fork_server"]


class Altered(makers.Store):
    """Publishes other values than the ranks do, by the end of their keys."""

    def __init__(self, **values: Any) -> None:
        super().__init__()
        self._values = values
        self._publish = self.publish
        self.publish = self._publish_altered

    async def _publish_altered(self, key: str, value: bytes) -> None:
        _, _, end = key.rpartition("/")
        alter = self._values.get(f"rank_{end}") if key.startswith("auto/") else None
        await self._publish(key, value if alter is None else alter(value))


def kinds(transport: Transport) -> dict[int, type[Transport]]:
    assert isinstance(transport, AutoTransport)
    return {peer: type(part) for part in transport._parts for peer in part.context.peers}


def test_ranks_that_met_in_one_process_use_inproc() -> None:
    left, _ = makers.contexts()
    assert isinstance(auto_transport(left), InprocTransport)
    assert isinstance(auto_transport(replace(left, rendezvous=makers.Store())), AutoTransport)


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ("boot", "it runs on another host"),
        ("user", "it belongs to another user"),
        ("user_namespace", "it is in another user namespace"),
        ("network_namespace", "it is in another network namespace"),
        ("pid_namespace", "it is in another pid namespace"),
        ("obstacle", "no memfd"),
    ],
)
def test_each_thing_that_two_processes_must_share_has_its_reason(field: str, reason: str) -> None:
    own = this_host()
    other = replace(own, **{field: "no memfd"})
    assert obstacle_between(own, own) == ""
    assert obstacle_between(own, other) == obstacle_between(other, own) == reason
    assert Host.unpack(0, own.pack()) == own


def test_the_doctors_sentence_names_what_must_be_shared() -> None:
    own = this_host()
    for part in (own.user, own.network_namespace, own.pid_namespace, "shm", "zmq", "inproc"):
        assert part in explain()


async def test_each_rank_logs_its_choice_once(caplog: pytest.LogCaptureFixture) -> None:
    contexts = makers.contexts(PairOptions(ranks=3), rendezvous=makers.Store(), allow_insecure=True)
    left, right, third = (AutoTransport(contexts[0]), AutoTransport(contexts[1]), makers.Abroad(contexts[2]))
    with caplog.at_level(logging.INFO, logger="rrfp.transports.auto"):
        async with makers.started(left, right, third) as pair:
            assert kinds(left) == {1: ShmTransport, 2: ZmqTransport}
            assert kinds(third) == {0: ZmqTransport, 1: ZmqTransport}
            await pass_on(pair, data(torch.ones(100_000)))
    assert sorted(record.getMessage() for record in caplog.records) == [
        "transport of rank 0: shm with rank 1; zmq (it runs on another host) with rank 2",
        "transport of rank 1: shm with rank 0; zmq (it runs on another host) with rank 2",
        "transport of rank 2: zmq (it runs on another host) with rank 0, 1",
    ]


async def test_where_passing_memory_fails_both_ends_use_zmq(caplog: pytest.LogCaptureFixture) -> None:
    nowhere = Altered(rank_0=lambda value: value.replace(b"rrfp-shm-0-", b"rrfp-shm-9-"))
    transports = [AutoTransport(context) for context in makers.contexts(rendezvous=nowhere)]
    with caplog.at_level(logging.INFO, logger="rrfp.transports.auto"):
        async with makers.started(*transports) as pair:
            assert [kinds(transport) for transport in transports] == [{1: ZmqTransport}, {0: ZmqTransport}]
            await pass_on(pair, data(torch.ones(100_000)))
    assert all("zmq (passing shared memory failed: [Errno 111]" in record.getMessage() for record in caplog.records)


async def test_where_nobody_answers_the_trial_in_time_both_ends_use_zmq(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "TRIAL_S", 0.1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind("")  # to an address that the kernel chooses
        silent.listen()
        address = silent.getsockname()[1:].decode()
        met = Altered(rank_0=lambda value: replace(Host.unpack(0, value), address=address).pack())
        transports = [AutoTransport(context) for context in makers.contexts(rendezvous=met)]
        with caplog.at_level(logging.INFO, logger="rrfp.transports.auto"):
            async with makers.started(*transports):
                assert [kinds(transport) for transport in transports] == [{1: ZmqTransport}, {0: ZmqTransport}]
    assert all("zmq (passing shared memory took more than 0.1 s)" in text for text in caplog.messages)


async def test_a_malformed_entry_of_the_store_names_its_rank() -> None:
    for value in (b"", b"\xc1", b"\x90", b"\x92\x80\x01", b"\x92\x81\xa4boot\x01\xa0"):
        left, right = makers.contexts(rendezvous=Altered(rank_0=lambda _, value=value: value), connect_timeout_s=5.0)
        transports = [AutoTransport(left), AutoTransport(right)]
        starting = [asyncio.create_task(transport.start()) for transport in transports]
        with pytest.raises(TransportError, match=r"rank 0, or another program, wrote .* which is malformed"):
            await soon(starting[1], "start fails")
        starting[0].cancel()
        await asyncio.wait(starting)
        for transport in transports:
            transport.abort()


async def test_an_answer_to_the_trial_that_is_no_text_is_a_reason_against_sharing() -> None:
    met = Altered(**{"rank_0-1": lambda _: b"\xff\xfe"})
    choices = [HostChoice(context, this_host()) for context in makers.contexts(rendezvous=met)]
    deadline_s = asyncio.get_running_loop().time() + 5
    await soon(asyncio.gather(*(choice.look(HomeLoop(), deadline_s) for choice in choices)), "both have chosen")
    assert choices[0].obstacles == {1: "\ufffd\ufffd"}


async def test_a_peer_that_does_not_come_is_named() -> None:
    left, _ = makers.contexts(rendezvous=makers.Store(), connect_timeout_s=0.2)
    transport = AutoTransport(left)
    with pytest.raises(TransportError, match="rank 1 did not connect"):
        await soon(transport.start(), "start fails")
    with pytest.raises(TransportClosedError):
        await transport.start()


async def test_before_start_it_is_not_started() -> None:
    left, _ = makers.contexts(rendezvous=makers.Store())
    transport = AutoTransport(left)
    with pytest.raises(TransportClosedError, match="not started"):
        await transport.send(1, note())
    with pytest.raises(TransportClosedError, match="not started"):
        await transport.receive()
    assert not transport.send_at_once(1, note())
    assert transport.statistics().messages_sent == 0
    await transport.close()


async def test_a_rank_without_peers_starts_and_ends() -> None:
    context = replace(makers.contexts(rendezvous=makers.Store())[0], peers=())
    transport = AutoTransport(context)
    await soon(transport.start(), "it starts")
    await soon(transport.close(), "it ends")


async def test_a_rank_in_another_pid_namespace_of_the_host_is_reached_by_zmq(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    child = asyncio.create_task(asyncio.to_thread(in_child, echo_in_new_pid_namespace, store))
    rendezvous = StoreRendezvous(FileStore(store, 2), run_id=RUN_ID)
    transport = AutoTransport(TransportContext(0, (1,), RUN_ID, rendezvous, connect_timeout_s=20))
    starting = asyncio.create_task(transport.start())
    await asyncio.wait({starting, child}, return_when=asyncio.FIRST_COMPLETED)
    if child.done():
        starting.cancel()
        await child  # skips
    await starting
    assert kinds(transport) == {1: ZmqTransport}
    await transport.send(1, data(torch.arange(50_000)))
    (tensor,) = (await receive(transport)).tensors
    assert tensor is not None
    assert torch.equal(tensor, torch.arange(50_000))
    await transport.close()
    assert await child == ""


async def test_messages_over_both_transports_are_received_and_then_delivered() -> None:
    async with makers.auto_mixed(PairOptions(ranks=3)) as pair:
        assert pair.third is not None
        await pair.right.send(0, note(1))
        assert index_of(await receive(pair.left)) == 1
        await pair.third.send(0, note(2))
        delivered: asyncio.Queue[Any] = asyncio.Queue()
        cast(AutoTransport, pair.left).deliver_to(delivered.put_nowait)
        await pair.third.send(0, note(3))
        assert [index_of(await soon(delivered.get(), "it is delivered")) for _ in range(2)] == [2, 3]
