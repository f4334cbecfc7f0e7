"""How process groups are made, over gloo: peers that make none, starts that are given up, settings that are refused."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import transports.makers as makers
from transports.gloo_backend import GlooBackend, over_gloo

from rrfp.errors import ConfigError, TransportClosedError, TransportError
from rrfp.testing.transport_checks.pair import soon
from rrfp.transports import DeviceCopies
from rrfp.transports.base import TransportContext
from rrfp.transports.collective.channel import RankPair
from rrfp.transports.collective.transport import CollectiveTransport, check_leave, nccl_backend
from rrfp.transports.inproc import InprocTransport
from rrfp.transports.rendezvous import LocalRendezvous


async def test_a_peer_that_can_make_no_group_is_named_at_once() -> None:
    left, right = makers.contexts(rendezvous=makers.Store(), connect_timeout_s=60.0)
    one = over_gloo(left)
    other = CollectiveTransport(right, Refusing(1))
    started = asyncio.gather(one.start(), other.start(), return_exceptions=True)
    first, second = await soon(started, "both give up")
    assert isinstance(first, TransportError)
    assert str(first).startswith("rank 1 connected, then left: ")
    assert isinstance(second, TransportError)
    assert str(second) == "no process group with rank 0 within 60 s: no network here"


class Refusing(GlooBackend):
    """Cannot make groups."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank, "127.0.0.1")

    def connect(self, pair: RankPair, store: Any, timeout_s: float) -> Any:
        raise RuntimeError("no network here")


class Stuck(GlooBackend):
    """Its connecting takes no notice of a limit, as gloo's where the other end has died."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank, "127.0.0.1")
        self.entered = threading.Event()
        self.released = threading.Event()

    def connect(self, pair: RankPair, store: Any, timeout_s: float) -> Any:
        self.entered.set()
        self.released.wait()
        raise RuntimeError("released")


@asynccontextmanager
async def stuck_start(**changes: Any) -> AsyncIterator[tuple[CollectiveTransport, CollectiveTransport, Any]]:
    """Two ends, each of which waits in its backend, and the start of the first."""
    contexts = makers.contexts(rendezvous=makers.Store(), **changes)
    backends = [Stuck(context.rank) for context in contexts]
    one, other = map(CollectiveTransport, contexts, backends)
    starts = [asyncio.create_task(end.start()) for end in (one, other)]
    try:
        for backend in backends:
            await soon(asyncio.to_thread(backend.entered.wait, 10), "the start waits for a group")
        yield one, other, starts[0]
    finally:
        for backend in backends:
            backend.released.set()
        one.abort()
        other.abort()
        await asyncio.gather(*starts, return_exceptions=True)


async def test_a_backend_that_connects_for_too_long_is_not_waited_for() -> None:
    async with stuck_start(connect_timeout_s=1.0) as (_, _, starting):
        with pytest.raises(TransportError, match="no process group with rank 1 within 1 s: its end did not come"):
            await soon(starting, "start ends")


async def test_a_peer_that_ends_while_groups_are_made_is_not_waited_for() -> None:
    async with stuck_start(connect_timeout_s=60.0) as (_, other, starting):
        other.abort()
        with pytest.raises(TransportError, match="rank 1 connected, then left"):
            await soon(starting, "start ends")


async def test_an_abort_ends_a_start_whose_backend_does_not_return() -> None:
    async with stuck_start(connect_timeout_s=60.0) as (one, _, starting):
        one.abort()
        with pytest.raises(TransportClosedError):
            await soon(starting, "start ends")


@pytest.mark.parametrize("how", ["cancel", "abort"])
async def test_a_start_that_waits_for_a_group_can_be_given_up(how: str) -> None:
    """No thread waits on for the peer (the leak guard looks)."""
    entered = threading.Event()

    class Waiting(GlooBackend):
        def connect(self, pair: RankPair, store: Any, timeout_s: float) -> Any:
            entered.set()
            return super().connect(pair, store, timeout_s)

    rendezvous = LocalRendezvous()
    left, right = makers.contexts(rendezvous=rendezvous)
    base = InprocTransport(right)  # the peer is there, and makes no group
    one = CollectiveTransport(left, Waiting(0, "127.0.0.1"))
    joining = asyncio.create_task(base.start())
    starting = asyncio.create_task(one.start())
    await soon(asyncio.to_thread(entered.wait, 10), "the start waits for a group")
    if how == "abort":
        one.abort()
        with pytest.raises(TransportClosedError):
            await soon(starting, "start ends")
    else:
        starting.cancel()
        await soon(asyncio.wait({starting}), "start ends")
        assert starting.cancelled()
    await joining
    base.abort()


@pytest.mark.parametrize("single_host", [True, False], ids=["one host", "several hosts"])
async def test_plain_connections_need_a_leave(single_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a job with a secret and of one without, over loopback too: any user of the host may connect there."""
    monkeypatch.setattr("rrfp.transports.collective.transport.interface_towards_master", lambda: "192.0.2.7")
    address = "127.0.0.1" if single_host else "192.0.2.7"
    bare = makers.contexts(single_host=single_host)[0]
    secret = replace(bare, secret=makers.SECRET)
    with pytest.raises(ConfigError, match=rf"collective would use tcp at {re.escape(address)} .*allow_insecure=True"):
        await check_leave(bare)
    with pytest.raises(ConfigError, match=rf"plain text over tcp at {re.escape(address)}, .*; pass data='plain'"):
        await check_leave(secret)
    for context in (replace(bare, allow_insecure=True), replace(secret, plain_data=True)):
        assert await check_leave(context) == address


@pytest.mark.parametrize(
    ("environ", "refused"),
    [
        ({}, ""),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "8", "NCCL_LAUNCH_ORDER_IMPLICIT": "0"}, ""),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "CUDA_DEVICE_MAX_CONNECTIONS is '1', must be unset or at least 8"),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "7"}, "CUDA_DEVICE_MAX_CONNECTIONS is '7', must be unset or at least 8"),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "many"}, "CUDA_DEVICE_MAX_CONNECTIONS is 'many', must be unset or at least 8"),
        ({"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}, "NCCL_LAUNCH_ORDER_IMPLICIT is '1', must be unset or '0'"),
    ],
    ids=["none", "good", "one queue", "few queues", "no number", "implicit order"],
)
async def test_settings_under_which_nccl_deadlocks_are_refused_by_name(
    environ: dict[str, str], refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_LAUNCH_ORDER_IMPLICIT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    if not refused:
        await nccl_backend(on_cuda())
        return
    with pytest.raises(ConfigError, match=refused) as raised:
        await nccl_backend(on_cuda())
    assert "transport='auto', which copies tensors through host memory" in str(raised.value)


def on_cuda() -> TransportContext:
    class Copies:
        kind, index = "cuda", 0

    return replace(makers.contexts(allow_insecure=True)[0], copies=cast(DeviceCopies, Copies()))


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="this torch has NCCL")
async def test_a_rank_on_cuda_without_nccl_is_told_what_is_left() -> None:
    with pytest.raises(ConfigError, match="this torch has no NCCL; 'auto' copies tensors through host memory"):
        await nccl_backend(on_cuda())


async def test_a_rank_on_the_cpu_is_told_that_collective_is_for_cuda() -> None:
    context = makers.contexts(allow_insecure=True)[0]
    with pytest.raises(ConfigError, match="must be another one for ranks on the CPU: it moves tensors between CUDA"):
        await CollectiveTransport(context).start()
