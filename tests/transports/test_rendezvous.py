"""Ranks find each other's endpoints, in one process and through torch's store, or learn in time what is missing."""

from __future__ import annotations

import asyncio
import socket
import threading
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from transports.makers import LoopInThread

from rrfp import Topology
from rrfp.errors import ConfigError, TransportError
from rrfp.transports.base import Rendezvous, Transport, TransportContext
from rrfp.transports.inproc import InprocTransport
from rrfp.transports.rendezvous import LocalRendezvous, StoreRendezvous, in_thread
from rrfp.transports.zmq.transport import ZmqTransport


@pytest.fixture
def store() -> Any:
    return TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=10), wait_for_workers=False)


def environment(store: Any, **changes: str) -> dict[str, str]:
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(getattr(store, "port", 0)),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "RANK": "0",
    } | changes


async def test_lookup_waits_for_publish_on_another_loop() -> None:
    rendezvous = LocalRendezvous()
    async with LoopInThread() as loop:
        looking = asyncio.create_task(loop.run(rendezvous.lookup("key", 5.0)))
        await asyncio.sleep(0)
        await rendezvous.publish("key", b"value")
        task, _ = await looking
    assert task.result() == b"value"
    assert await rendezvous.lookup("key", 0.0) == b"value"


async def test_store_passes_values_between_clients(store: Any) -> None:
    topology = Topology(stage=0, stages=2, run_id="run")
    first, second = [await StoreRendezvous.from_env(topology, environment(store, RANK=rank)) for rank in "01"]
    looking = asyncio.create_task(second.lookup("key", 5.0))
    await first.publish("key", b"\0binary\xff")
    assert await looking == b"\0binary\xff"


def test_one_rendezvous_serves_the_loops_of_several_pipelines(store: Any) -> None:
    rendezvous = StoreRendezvous(store, run_id="run")

    async def look_twice(key: str) -> list[bytes]:
        await rendezvous.publish(key, b"value")
        return [*await asyncio.gather(rendezvous.lookup(key, 5.0), rendezvous.lookup(key, 5.0))]

    for key in ("first", "second"):
        assert asyncio.run(look_twice(key)) == [b"value", b"value"]


async def test_runs_and_restarts_do_not_see_each_other(store: Any) -> None:
    here = StoreRendezvous(store, run_id="run", restart=1)
    await StoreRendezvous(store, run_id="run", restart=0).publish("key", b"old")
    await StoreRendezvous(store, run_id="other", restart=1).publish("key", b"foreign")
    with pytest.raises(TransportError, match="'key'"):
        await here.lookup("key", 0.05)


async def test_rank_0_hosts_the_store_where_no_agent_does() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    variables = environment(None, MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="False")
    topology = Topology(stage=0, stages=2, run_id="run")
    host = await StoreRendezvous.from_env(topology, variables)
    client = await StoreRendezvous.from_env(topology, variables | {"RANK": "1"})
    await client.publish("key", b"value")
    assert await host.lookup("key", 5.0) == b"value"


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT", "RANK"])
async def test_a_missing_variable_is_named(store: Any, missing: str) -> None:
    variables = environment(store)
    del variables[missing]
    with pytest.raises(ConfigError, match=f"{missing} is not set.*torchrun"):
        await StoreRendezvous.from_env(Topology(stage=0, stages=1), variables)


@pytest.mark.parametrize("port", ["x", "-1", "0", "65536", "99999", "1" * 40])
async def test_a_port_that_is_none_is_named(store: Any, port: str) -> None:
    with pytest.raises(ConfigError, match=rf"MASTER_PORT is '{port}', must be a port number, 1\.\.65535"):
        await StoreRendezvous.from_env(Topology(stage=0, stages=1), environment(store, MASTER_PORT=port))


@pytest.mark.parametrize("kind", ["local", "store"])
async def test_an_absent_key_is_named_in_time(store: Any, kind: str) -> None:
    rendezvous: Rendezvous = LocalRendezvous() if kind == "local" else StoreRendezvous(store, run_id="run")
    with pytest.raises(TransportError, match=r"'zmq/3' within 0\.05 s"):
        await rendezvous.lookup("zmq/3", 0.05)


@pytest.mark.parametrize("kind", ["local", "store"])
async def test_a_cancelled_lookup_leaves_nothing(store: Any, kind: str) -> None:
    rendezvous: Rendezvous = LocalRendezvous() if kind == "local" else StoreRendezvous(store, run_id="run")
    looking = asyncio.create_task(rendezvous.lookup("key", 30.0))
    await asyncio.sleep(0)
    looking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await looking
    await rendezvous.publish("key", b"value")
    assert await rendezvous.lookup("key", 5.0) == b"value"


@pytest.mark.parametrize("transport", [InprocTransport, ZmqTransport])
async def test_a_rendezvous_that_hangs_ends_the_start_in_time(transport: type[Transport]) -> None:
    class Hanging(LocalRendezvous):
        async def publish(self, key: str, value: bytes) -> None:
            await asyncio.Event().wait()

    context = TransportContext(0, (1,), "run", Hanging(), connect_timeout_s=0.05)
    with pytest.raises(TransportError, match=r"rendezvous did not accept '.*run/0/0' within 0\.05 s"):
        await transport(context).start()


async def test_a_blocking_call_ends_with_its_thread() -> None:
    threads = set(threading.enumerate())
    assert await in_thread(threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 / 0)
    for thread in set(threading.enumerate()) - threads:
        await asyncio.to_thread(thread.join, 5.0)
