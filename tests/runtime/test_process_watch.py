"""Which process a rank is, and the moment in which it ends."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import msgpack
import pytest

from rrfp import timeouts
from rrfp.errors import ProtocolError
from rrfp.host import ProcessIdentity, ProcessWatch, ended, open_pidfd, started_at
from rrfp.runtime.records import pack, unpack

OWN = ProcessIdentity.own()


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def identity_of(pid: int) -> ProcessIdentity:
    return replace(OWN, pid=pid, started=started_at(pid))


async def wait_for_loss(process: ProcessIdentity) -> int:
    lost: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    watch = ProcessWatch(lost.set_result)
    watch.start([3], {3: process}, OWN)
    try:
        return await asyncio.wait_for(lost, 10)
    finally:
        watch.close()
        watch.close()


def test_the_end_of_a_process_is_told_once_its_last_messages_may_have_been_read() -> None:
    async def kill_and_wait() -> float:
        waiting = asyncio.create_task(wait_for_loss(identity_of(process.pid)))
        await asyncio.sleep(0)
        assert not waiting.done()
        process.kill()
        killed = time.monotonic()
        assert await waiting == 3
        return time.monotonic() - killed

    with sleeper() as process:
        assert asyncio.run(kill_and_wait()) >= 0.9 * timeouts.LAST_MESSAGES_S


def test_an_id_that_was_used_again_is_another_process() -> None:
    with sleeper() as process:
        earlier = replace(identity_of(process.pid), started=1)
        assert asyncio.run(wait_for_loss(earlier)) == 3
        process.kill()


@pytest.mark.parametrize(
    "other",
    [OWN, replace(OWN, pid=1, space="elsewhere"), replace(OWN, pid=1, space=""), replace(OWN, pid=1, started=0)],
    ids=["itself", "another host", "no known host", "no known start"],
)
def test_what_cannot_be_told_apart_is_not_watched(other: ProcessIdentity) -> None:
    assert open_pidfd(other, OWN) is None


def test_a_process_that_may_not_be_watched_is_not() -> None:
    with sleeper() as process, patch("os.pidfd_open", side_effect=PermissionError):
        assert open_pidfd(identity_of(process.pid), OWN) is None
        process.kill()


def test_no_descriptor_is_left() -> None:
    async def watch_and_close() -> None:
        watch = ProcessWatch(lambda peer: None)
        watch.start([0], {0: identity_of(process.pid)}, OWN)
        watch.close()

    with sleeper() as process:
        asyncio.run(watch_and_close())
        before = len(os.listdir("/proc/self/fd"))
        asyncio.run(watch_and_close())
        assert len(os.listdir("/proc/self/fd")) == before
        process.kill()


def test_one_may_wait_for_the_end_of_a_process() -> None:
    async def wait() -> list[bool]:
        identity = identity_of(process.pid)
        before = await ended(identity, OWN, 0.05)
        waiting = asyncio.create_task(ended(identity, OWN, 10.0))
        await asyncio.sleep(0)
        process.kill()
        return [before, await waiting, await ended(replace(identity, started=1), OWN, 10.0)]

    with sleeper() as process:
        assert asyncio.run(wait()) == [False, True, True]
    assert asyncio.run(ended(replace(OWN, pid=1, space="elsewhere"), OWN, 10.0)) is False


def test_an_identity_travels() -> None:
    assert unpack(ProcessIdentity, pack(OWN), "an identity") == OWN
    assert str(OWN) == f"host {OWN.host}, pid {os.getpid()}"
    assert OWN.started > 0


@pytest.mark.parametrize("data", [b"", b"\xc1", msgpack.packb([1, 2, 3, 4]), msgpack.packb(["a", 1, 2])])
def test_a_malformed_identity_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="the identity of a process cannot be read"):
        unpack(ProcessIdentity, data, "the identity of a process")


def test_a_process_began_between_its_parents_looks_at_the_clock() -> None:
    def uptime() -> float:
        return float(Path("/proc/uptime").read_text().split()[0]) * os.sysconf("SC_CLK_TCK")

    before = uptime()
    child = sleeper()
    try:
        assert before - 1 <= started_at(child.pid) <= uptime() + 1
    finally:
        child.communicate(b"\n")
