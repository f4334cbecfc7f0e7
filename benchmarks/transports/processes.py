"""The two processes of the comparison, as its command sees them. Imports no torch: they do, both at the same time."""

from __future__ import annotations

import multiprocessing
import socket
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from socket import socketpair
from typing import Any, NamedTuple, Protocol

from benchmarks.transports.settings import Block, Settings

_RANKS = 2

#: Longer than the processes need to leave.
_CLOSE_S = 60.0


class Barrier(Protocol):
    """Of multiprocessing."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the other process."""

    def abort(self) -> None:
        """Make the other process's wait fail."""


class Sockets(NamedTuple):
    """One rank's bare sockets, connected to the other's."""

    blocking: socket.socket
    hopping: socket.socket


class Report(NamedTuple):
    """One block, as one process saw it.

    Attributes:
        block: of the plan.
        seconds: of half round trips, or of the whole stream; rank 0's only.
        cpu_s: processor time of this process.
    """

    block: Block
    seconds: list[float]
    cpu_s: float


class RoundReport(NamedTuple):
    """One round, as one process saw it.

    Attributes:
        blocks: in the order of the plan.
        wall_s: the whole round.
        cpu_s: processor time of this process meanwhile, between blocks too.
        machine_s: processor time of the whole machine, if this is known.
    """

    blocks: list[Report]
    wall_s: float
    cpu_s: float
    machine_s: float | None


def _serve(*arguments: Any) -> None:
    from benchmarks.transports.worker import serve

    serve(*arguments)


def run(settings: Settings) -> Iterator[list[RoundReport]]:
    """Run both processes, and yield their reports of each round of the plan.

    Raises:
        SystemExit: if one failed.
    """
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(_RANKS)
    pairs = [socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in Sockets._fields]
    processes, pipes = [], []
    with tempfile.TemporaryDirectory(prefix="rrfp-") as folder:
        for rank in range(_RANKS):
            pipe, theirs = context.Pipe(duplex=False)
            sockets = Sockets(*(pair[rank] for pair in pairs))
            process = context.Process(target=_serve, args=(rank, folder, settings, sockets, barrier, theirs))
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(pipe)
        for pair in pairs:
            for sock in pair:
                sock.close()
        try:
            for _ in settings.plan():
                yield [_receive(pipe, processes) for pipe in pipes]
            for process in processes:
                process.join(_CLOSE_S)
        finally:
            for process in processes:
                process.kill()
                process.join()
    if any(process.exitcode != 0 for process in processes):
        raise SystemExit("a process failed when it closed")


def _receive(pipe: Connection, processes: list[Any]) -> RoundReport:
    """The next report; a SystemExit if a process ends instead, for which the other one would wait."""
    wait([pipe, *(process.sentinel for process in processes)])
    if not pipe.poll():
        raise SystemExit("a process failed")
    report: RoundReport = pipe.recv()
    return report
