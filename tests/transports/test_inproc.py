"""What is particular to inproc: loops that end, ranks that never come, and memory that is used again."""

from __future__ import annotations

import asyncio
import gc
import threading
from dataclasses import replace

import pytest
import torch
import transports.makers as makers

from rrfp.errors import ConfigError, PeerLostError, TransportError
from rrfp.testing.transport_checks import PairOptions
from rrfp.testing.transport_checks.pair import data, index_of, soon
from rrfp.transports import BufferPool
from rrfp.transports.inproc import InprocTransport

MIB = 1 << 20


async def test_a_peer_whose_loop_ends_is_lost() -> None:
    """Its thread ran asyncio.run, sent something and returned without closing the transport."""
    left, right = map(InprocTransport, makers.contexts())

    async def short_life() -> None:
        await right.start()
        await right.send(0, data(torch.ones(2), index=5))

    thread = threading.Thread(target=lambda: asyncio.run(short_life()))
    thread.start()
    await left.start()
    assert index_of(await soon(left.receive(), "what it sent arrives")) == 5
    with pytest.raises(PeerLostError):
        await soon(left.receive(), "the end of its loop is noticed")
    with pytest.raises(PeerLostError):
        await left.send(1, data())
    await left.close()
    await asyncio.to_thread(thread.join)


async def test_a_rank_that_never_comes_is_named() -> None:
    left, _ = makers.contexts(connect_timeout_s=0.05)
    with pytest.raises(TransportError, match="rank 1 did not connect"):
        await InprocTransport(left).start()


async def test_ranks_of_other_runs_do_not_meet() -> None:
    left, right = makers.contexts(connect_timeout_s=0.05)
    ends = InprocTransport(left), InprocTransport(replace(right, restart=1))
    failures = await asyncio.gather(*(end.start() for end in ends), return_exceptions=True)
    assert [type(failure) for failure in failures] == [TransportError, TransportError]


async def test_a_rank_in_another_process_is_refused() -> None:
    left, _ = makers.contexts()
    await left.rendezvous.publish(f"inproc/{left.run_id}/0/1", b"")
    with pytest.raises(ConfigError, match="another process"):
        await InprocTransport(left).start()


async def test_a_stage_has_one_transport() -> None:
    async with makers.MAKERS["inproc"](PairOptions()) as pair:
        with pytest.raises(ConfigError, match="has a transport already"):
            await InprocTransport(pair.left.context).start()


def test_memory_is_used_again_once_nobody_refers_to_it() -> None:
    pool, size = BufferPool(), MIB
    tensor = torch.frombuffer(pool.acquire(size), dtype=torch.uint8)
    address = tensor.data_ptr()
    other = torch.frombuffer(pool.acquire(size), dtype=torch.uint8)
    assert other.data_ptr() != address
    view = tensor[5:]
    del tensor
    assert pool.idle_bytes == 0
    del view
    assert pool.idle_bytes == size
    assert torch.frombuffer(pool.acquire(size), dtype=torch.uint8).data_ptr() == address


def test_idle_memory_is_bounded_and_the_oldest_size_goes_first() -> None:
    unit = MIB
    pool = BufferPool(idle_bytes=4 * unit)
    for count in (1, 2, 3):
        pool.acquire(count * unit).release()
    gc.collect()
    assert pool.idle_bytes == 3 * unit
    pool.acquire(5 * unit).release()
    assert pool.idle_bytes == 3 * unit


async def test_a_rank_that_left_before_this_one_joined_was_never_met() -> None:
    left, right = makers.contexts(connect_timeout_s=0.05)
    with pytest.raises(TransportError, match="did not connect"):
        await InprocTransport(left).start()
    with pytest.raises(TransportError, match="connected, then left"):
        await InprocTransport(right).start()
