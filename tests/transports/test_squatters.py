"""A store and ports that others have written to or taken: one error says which rank is missed, and nobody is it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import transports.makers as makers
import transports.shm_children as children
import transports.squatters as squatters
from fork_server import context as fork_context
from fork_server import fork_server
from transports.children import in_child
from transports.test_curve import WAYS, forged, over_tcp, published_by

from rrfp.errors import TransportError
from rrfp.testing.transport_checks import Pair
from rrfp.testing.transport_checks.pair import data, index_of, pass_on, soon
from rrfp.transports.rendezvous import LocalRendezvous
from rrfp.transports.secret import Secret, split_voucher, vouch
from rrfp.transports.zmq.security import Published, Security
from rrfp.transports.zmq.transport import ZmqTransport, endpoint_key

__all__ = ["fork_server"]

SECRET = makers.SECRET

#: A user that no test runs as.
NOBODY = 65534

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a process as another user")


@as_root
@pytest.mark.parametrize("way", ["secret", "insecure"])
async def test_another_user_that_comes_first_as_a_rank_takes_no_ranks_place(way: str, fork_server: None) -> None:
    """Over tcp the kernel tells nothing about users; the handshake decides."""
    left, right = over_tcp(makers.contexts(**WAYS[way], connect_timeout_s=30.0))
    starting = asyncio.create_task(right.start())
    try:
        published = await published_by(1, left.context)
        arguments = (children.write_as, NOBODY, published.endpoint, forged(left.context))
        assert await asyncio.to_thread(in_child, *arguments)
        assert not starting.done()
        await soon(left.start(), "the real rank connects")
        await soon(starting, "its peer does")
        assert index_of(await pass_on(Pair(left, right, makers.RUN_ID), data(index=1))) == 1
        statistics = right.statistics()
        assert (statistics.dropped_frames, statistics.strangers > 0) == (0, True)
    finally:
        left.abort()
        right.abort()
        await asyncio.gather(starting, return_exceptions=True)


@as_root
@pytest.mark.parametrize("way", ["secret", "plain data"])
async def test_another_user_on_a_ranks_port_is_not_taken_for_the_rank(way: str, fork_server: None) -> None:
    """It listens where rank 1 did, and lets everybody in; what the store says is still the rank's own."""
    left, right = makers.contexts(**WAYS[way], connect_timeout_s=2.0)
    here, there = fork_context().Pipe()
    serving = asyncio.create_task(asyncio.to_thread(in_child, squatters.serve, NOBODY, there))
    endpoints = (await asyncio.to_thread(here.recv))[: 2 if way == "plain data" else 1]
    await left.rendezvous.publish(endpoint_key(right, 1), Security(right).publish(endpoints))
    with pytest.raises(TransportError, match=r"^no connection with rank 1 within 2 s$"):
        await ZmqTransport(left, "127.0.0.1").start()
    here.send("enough")
    got = await serving
    assert "encrypted" not in got
    here.close()
    there.close()


#: Makes what a store passes on, of the head of a value, which ends with the voucher, and of the rest.
Rewrite = Callable[[bytes, Published], bytes]


class Rewriting(LocalRendezvous):
    """A store that passes on something else than rank 1 published."""

    def __init__(self, rewrite: Rewrite) -> None:
        super().__init__()
        self._rewrite = rewrite

    async def publish(self, key: str, value: bytes) -> None:
        if key.endswith("/1"):
            _, rest = split_voucher(value)
            value = self._rewrite(value.removesuffix(rest), Published.unpack(rest))
        await super().publish(key, value)


def with_fields(**changes: Any) -> Rewrite:
    return lambda head, published: head + published._replace(**changes).pack()


def of_another(**changes: Any) -> Rewrite:
    """What a rank elsewhere published, with a voucher that was good there."""
    context = replace(makers.contexts(secret=SECRET)[1], **changes)
    return lambda _, published: Security(context).publish([published.endpoint])


REWRITTEN: dict[str, Rewrite] = {
    "endpoint": with_fields(endpoint="tcp://127.0.0.1:1"),
    "to ipc": with_fields(endpoint="ipc://@elsewhere"),
    "data endpoint": with_fields(data_endpoint="tcp://127.0.0.1:1"),
    "key": with_fields(key=bytes(32)),
    "voucher": lambda head, published: head[:-32] + bytes(32) + published.pack(),
    "no voucher": lambda _, published: published.pack(),
    "another rank": of_another(rank=0),
    "another run": of_another(run_id="before"),
    "before a restart": of_another(restart=7),
    "another secret": of_another(secret=Secret(b"of the owner of the store, or his own")),
}


@pytest.mark.parametrize("rewritten", REWRITTEN)
async def test_a_rewritten_endpoint_is_refused_and_its_rank_named(rewritten: str) -> None:
    rendezvous = Rewriting(REWRITTEN[rewritten])
    left, right = over_tcp(makers.contexts(secret=SECRET, rendezvous=rendezvous, connect_timeout_s=30.0))
    other = asyncio.create_task(right.start())
    with pytest.raises(
        TransportError, match=r"store has an endpoint of rank 1 .*vouch.*or another program wrote to the store"
    ):
        await soon(left.start(), "the refusal is raised")
    other.cancel()
    await asyncio.wait({other})


async def test_another_secret_on_one_rank_is_named_by_both_at_once() -> None:
    one, other = makers.contexts(connect_timeout_s=30.0)
    ends = over_tcp([replace(one, secret=SECRET), replace(other, secret=Secret(b"0" * 32))])
    outcomes = await soon(asyncio.gather(*(end.start() for end in ends), return_exceptions=True), "both raise")
    for peer, outcome in zip((1, 0), outcomes, strict=True):
        assert isinstance(outcome, TransportError)
        assert f"store has an endpoint of rank {peer} that the secret of this job does not vouch for" in str(outcome)


async def test_a_secret_on_one_rank_only_is_named_by_both_at_once() -> None:
    one, other = makers.contexts(connect_timeout_s=30.0)
    ends = over_tcp([replace(one, secret=SECRET), replace(other, allow_insecure=True)])
    outcomes = await soon(asyncio.gather(*(end.start() for end in ends), return_exceptions=True), "both raise")
    assert [type(outcome) for outcome in outcomes] == [TransportError] * 2
    assert "store has an endpoint of rank 1 without a voucher: the rank has no secret" in str(outcomes[0])
    assert "store has an endpoint of rank 0 with a voucher: the rank has a secret, and rank 1 has none" in str(
        outcomes[1]
    )


async def test_a_voucher_that_a_stranger_writes_blames_the_store() -> None:
    one, _ = makers.contexts(connect_timeout_s=30.0)
    (end,) = over_tcp([replace(one, allow_insecure=True)])
    endpoint = b"tcp://127.0.0.1:1 - " + b"00" * 32
    await one.rendezvous.publish(endpoint_key(one, 1), vouch(Secret(bytes(32)), endpoint))
    with pytest.raises(
        TransportError, match=r"an endpoint of rank 1 with a voucher.*, or another program wrote to the"
    ):
        await soon(end.start(), "the refusal is raised")


async def test_plain_and_encrypted_tensors_do_not_meet() -> None:
    one, other = makers.contexts(secret=SECRET, connect_timeout_s=30.0)
    ends = over_tcp([one, replace(other, plain_data=True)])
    outcomes = await soon(asyncio.gather(*(end.start() for end in ends), return_exceptions=True), "both raise")
    assert ["takes tensors plain" in str(outcomes[0]), "takes tensors encrypted" in str(outcomes[1])] == [True, True]


async def test_with_a_secret_ipc_endpoints_are_vouched_for_too() -> None:
    left, right = makers.contexts(secret=SECRET)
    async with makers.started(ZmqTransport(left), ZmqTransport(right)) as pair:
        assert index_of(await pass_on(pair, data(index=3))) == 3
    left, _ = makers.contexts(secret=SECRET)
    await left.rendezvous.publish(endpoint_key(left, 1), b"ipc://@of-somebody-else")
    with pytest.raises(TransportError, match="store has an endpoint of rank 1 without a voucher"):
        await ZmqTransport(left).start()
