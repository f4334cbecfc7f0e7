"""Processes forked from one that has imported Megatron, which takes seconds."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

#: Of Linux's prctl: the signal that this process gets when its parent ends.
_PR_SET_PDEATHSIG = 1

#: A process of a job, and the end of a pipe from it.
Forked = tuple[int, Connection]


def forked(function: Callable[..., object], *args: object) -> Forked:
    """Run ``function`` in a process with the other end of a pipe."""
    receiving, sending = multiprocessing.Pipe(duplex=False)
    if pid := os.fork():
        sending.close()
        return pid, receiving
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        function(sending, *args)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(0)


@contextmanager
def ranks_of(count: int, function: Callable[..., object], *args: object) -> Iterator[list[Forked]]:
    """``function`` on so many ranks of gloo, each with a pipe to this process; killed at the end."""
    gc.freeze()  # or each rank would copy the heap when it collects garbage
    keeper, told = forked(_keep_store)
    ranks: list[Forked] = []
    try:
        port = told.recv()
        for rank in range(count):
            ranks.append(forked(_join, rank, count, port, function, *args))  # noqa: PERF401 - killed, should one fail
        yield ranks
    finally:
        for pid, report in [*ranks, (keeper, told)]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            report.close()


def _keep_store(report: Connection) -> None:
    """What a launcher does, and no rank's death ends."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    report.send(store.port)
    signal.pause()


def _join(report: Connection, rank: int, count: int, port: int, function: Callable[..., object], *args: object) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timedelta(seconds=60))
    function(report, *args)
