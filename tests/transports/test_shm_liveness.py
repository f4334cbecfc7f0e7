"""Whether a peer's process ended or is stopped; what threads may read while sockets come and go."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop
from freezers import VERSIONS, freezer
from transports.makers import MAKERS
from transports.shm_state import descriptors, no_garbage, no_mappings, shm_pair, until

from rrfp.errors import PeerLostError, TransportError
from rrfp.testing.transport_checks import run_transport_checks
from rrfp.transports.base import Channel
from rrfp.transports.links.flow import HomeLoop
from rrfp.transports.shm import liveness
from rrfp.transports.shm.liveness import PeerLiveness

__all__ = ["no_garbage", "no_mappings"]


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as started:
        yield started
        started.kill()


def is_stopped(process: subprocess.Popen[bytes]) -> bool:
    return Path(f"/proc/{process.pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"T"


async def test_an_ended_process_is_reported_once(process: subprocess.Popen[bytes]) -> None:
    before = descriptors()
    lost: list[str] = []
    watch = PeerLiveness(HomeLoop(), 0.01, 0.05)
    watch.watch(3, process.pid, lost.append)
    process.kill()
    await until(lambda: bool(lost))
    await asyncio.to_thread(process.wait)
    await asyncio.sleep(0.05)
    assert lost == ["its process ended"]
    watch.watch(3, process.pid, lost.append)  # nobody has this number any more
    await until(lambda: len(lost) == 2)
    watch.close()
    watch.close()
    assert descriptors() == before


async def test_a_stopped_process_is_lost_after_the_patience_and_one_that_pauses_is_not(
    process: subprocess.Popen[bytes],
) -> None:
    lost: list[str] = []
    is_lost = asyncio.Event()

    def lose(reason: str) -> None:
        lost.append(reason)
        is_lost.set()

    watch = PeerLiveness(HomeLoop(), 0.02, 0.4)
    watch.watch(3, process.pid, lose)
    for _ in range(3):  # longer than the patience in sum
        process.send_signal(signal.SIGSTOP)
        await until(lambda: is_stopped(process))
        await asyncio.sleep(0.2)
        process.send_signal(signal.SIGCONT)
        await until(lambda: not is_stopped(process))
        await asyncio.sleep(0.06)
    assert lost == []
    process.send_signal(signal.SIGSTOP)
    start_s = time.monotonic()
    await is_lost.wait()  # and no collections of garbage meanwhile: on a busy machine they take most of the loop's time
    assert time.monotonic() - start_s >= 0.4
    assert lost == ["its process is stopped, for 0.4 s already"]
    watch.close()


@pytest.mark.allow_blocking(reason="the loop stands still as if this process were stopped")
async def test_time_in_which_this_process_was_stopped_too_does_not_count(process: subprocess.Popen[bytes]) -> None:
    lost: list[str] = []
    watch = PeerLiveness(HomeLoop(), 0.02, 0.5)
    watch.watch(3, process.pid, lost.append)
    process.send_signal(signal.SIGSTOP)
    await until(lambda: is_stopped(process))
    await asyncio.sleep(0.1)
    time.sleep(0.8)  # noqa: ASYNC251
    await asyncio.sleep(0.05)  # looks follow, which find it stopped still
    assert lost == []
    process.send_signal(signal.SIGCONT)
    watch.close()


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_frozen_process_is_lost_after_the_patience_and_one_that_is_thawed_before_is_not(
    process: subprocess.Popen[bytes], version: str
) -> None:
    """It sleeps before, too: without any processor time, and with a state that a frozen process shows as well."""
    lost: asyncio.Queue[str] = asyncio.Queue()
    watch = PeerLiveness(HomeLoop(), 0.02, 0.4)
    with freezer(version) as group:
        watch.watch(3, process.pid, lost.put_nowait)
        await asyncio.sleep(0.5)
        group.take(process.pid)
        for _ in range(3):  # longer than the patience in sum
            await asyncio.to_thread(group.freeze)
            await asyncio.sleep(0.2)
            group.thaw()
            await asyncio.sleep(0.06)
        assert lost.empty()
        start_s = time.monotonic()
        await asyncio.to_thread(group.freeze)
        assert await lost.get() == "its process is frozen with its cgroup, for 0.4 s already"
        assert time.monotonic() - start_s >= 0.4
        watch.close()


async def test_where_cgroups_cannot_be_read_only_a_process_that_is_given_no_core_is_lost(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that sleeps for long stands for one in another container that is paused; a rank wakes up at times."""
    monkeypatch.setattr(liveness, "is_frozen", lambda pid: None)
    lost: asyncio.Queue[str] = asyncio.Queue()
    watch = PeerLiveness(HomeLoop(), 0.02, 0.6)
    program = (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\nwhile 1: time.sleep(0.2)"
    )
    waking = await asyncio.create_subprocess_exec(sys.executable, "-I", "-S", "-c", program)
    try:
        watch.watch(1, process.pid, lost.put_nowait)
        watch.watch(2, waking.pid, lambda reason: lost.put_nowait(f"rank 2: {reason}"))
        assert await lost.get() == "its process is given no core, as if its container were paused, for 0.6 s already"
        await asyncio.sleep(0.6)
        assert lost.empty()
    finally:
        watch.close()
        waking.kill()
        await waking.wait()


def test_a_cgroup_out_of_sight_is_unknown_and_the_root_of_all_is_not_frozen() -> None:
    assert liveness._is_frozen("", "/../another") is None
    assert liveness._is_frozen("no such", "/") is None
    for version, (root, _) in liveness._mounts().items():
        assert liveness._is_frozen(version, f"{root.rstrip('/')}/gone-in-the-meantime") is None
    assert liveness.is_frozen(os.getpid()) is not True
    assert liveness.is_frozen(2**22 + 1) is None


async def test_a_process_that_cannot_be_watched_is_a_clear_error() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    watch = PeerLiveness(HomeLoop(), 1.0, 1.0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(TransportError, match=rf"cannot watch process {os.getpid()} of rank 3: .*Too many open"):
            watch.watch(3, os.getpid(), print)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        watch.close()


async def test_a_thread_may_read_the_outlets_while_a_channel_is_added() -> None:
    """As `statistics` does."""
    async with shm_pair() as (left, _):
        link = left._links[1]
        reading = iter(link.outlets.values())
        next(reading)
        connection = link._connections.pop(Channel.BACKWARD)
        link.attach(Channel.BACKWARD, connection.packets, os.getpid(), accepted=True)
        assert len(list(reading)) == 2


async def test_a_peer_that_ends_between_two_of_its_sockets_is_lost_and_takes_no_more() -> None:
    async with shm_pair() as (left, right):
        link = left._links[1]
        connection = link._connections.pop(Channel.BACKWARD)
        right.abort()
        with pytest.raises(PeerLostError):
            await left.receive()
        link.attach(Channel.BACKWARD, connection.packets, os.getpid(), accepted=True)
        assert not link.has(Channel.BACKWARD)
        assert connection.packets._sock.fileno() == -1


async def test_posted_frames_wait_for_room_and_are_dropped_after_the_end() -> None:
    async with shm_pair() as (left, right):
        packets = left._links[1]._connections[Channel.CONTROL].packets
        for _ in range(100):  # more than the socket takes before the other end reads
            packets.post([bytes(100_000)])
        assert packets._posted
        right.abort()
        with pytest.raises(PeerLostError):
            await left.receive()
        packets.post([b"dropped"])
        assert not packets._posted


# complex32 is experimental to torch, which says so once.
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_contract_on_uvloop() -> None:
    uvloop.run(run_transport_checks(MAKERS["shm"]))
