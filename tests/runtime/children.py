"""The processes of a test's ranks: what they say, how they end."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from fork_server import context

from rrfp.errors import PipelineAborted


@dataclass
class End:
    """How a rank's program ended: the exception and its text, an abort's origin, and when, by ``time.monotonic()``.

    Where a stage has several ranks, ``culprit`` is the abort's.
    """

    error: str
    text: str
    origin: tuple[int, str | None, str] | None
    at: float
    value: Any = None
    logged: list[str] = field(default_factory=list)
    logged_at: list[float] = field(default_factory=list)
    culprit: int | None = None

    @classmethod
    def of(cls, program: Callable[[], Any]) -> End:
        """Run ``program``, and say how it ended."""
        try:
            value = program()
            return cls("", "", None, time.monotonic(), value)
        except PipelineAborted as aborted:
            origin = (aborted.origin.stage, aborted.origin.task, aborted.origin.cause)
            return cls("PipelineAborted", str(aborted), origin, time.monotonic(), culprit=aborted.origin.rank)
        except BaseException as other:
            return cls(type(other).__name__, str(other), None, time.monotonic())


class Children:
    """Processes by rank, each with a connection, over which it sends its `End` last."""

    def __init__(self) -> None:
        self.connections: list[Connection] = []
        self.processes: list[Any] = []

    def start(self, name: str, target: Callable[..., None], *arguments: Any) -> None:
        """Start the next rank: it calls ``target`` with the arguments and its end of the connection."""
        forked = context()
        here, there = forked.Pipe()
        process = forked.Process(target=target, args=(*arguments, there), name=name)
        process.start()
        there.close()
        self.connections.append(here)
        self.processes.append(process)

    def hear(self, rank: int, timeout_s: float = 30.0) -> Any:
        """What the program of ``rank`` says next."""
        assert self.connections[rank].poll(timeout_s), f"rank {rank} says nothing"
        return self.connections[rank].recv()

    def end(self, rank: int) -> End:
        """How the program of ``rank`` ended."""
        while not isinstance(said := self.hear(rank), End):
            pass
        return said

    def join(self, since: float, within_s: float = 15.0) -> None:
        """Wait until every process has ended."""
        for process in self.processes:
            process.join(max(0.0, since + within_s - time.monotonic()))
            assert not process.is_alive(), f"{process.name} still runs after {within_s} s"

    def kill(self) -> None:
        """Leave nothing behind, however the test went."""
        for process in self.processes:
            process.kill()
            process.join(10)
        for connection in self.connections:
            connection.close()
