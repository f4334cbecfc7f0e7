"""What the connections of one transport share, such as a thread for copies that are too long for the loop."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rrfp.transports.links.flow import HomeLoop, settle
from rrfp.transports.links.linked import LinkedTransport
from rrfp.transports.wire.codec import Codec

_Job = tuple[Callable[[], None], asyncio.Future[None]]


class Copier:
    """Runs functions one after the other in a thread. Used on one loop only."""

    def __init__(self, home: HomeLoop, name: str) -> None:
        self._home = home
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._started = False

    def run(self, function: Callable[[], None], *, now: bool) -> asyncio.Future[None]:
        """The future of a call; made here if ``now``, or without memory for a thread."""
        done: asyncio.Future[None] = self._home.loop.create_future()
        if now:
            settle(done, _call(function))
            return done
        if not self._started and not self._start():
            return self.run(function, now=True)
        self._jobs.put((function, done))
        return done

    def _start(self) -> bool:
        """Start the thread; False if this process may have no more."""
        try:
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        except RuntimeError:
            return False
        self._started = True
        return True

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            function, done = job
            error = _call(function)
            self._home.call(lambda done=done, error=error: settle(done, error))  # type: ignore[misc]
            del job, function, done, error  # the memory must not wait for the next job

    def close(self) -> None:
        """End the thread after the jobs that it has. May be called twice."""
        if self._started:
            self._jobs.put(None)


def _call(function: Callable[[], None]) -> Exception | None:
    try:
        function()
    except Exception as error:
        return error
    return None


@dataclass(frozen=True, slots=True)
class TransportState:
    """State shared by a transport's connections."""

    #: The transport that messages, bad frames and losses go to.
    owner: LinkedTransport[Any]
    home: HomeLoop
    codec: Codec
    #: For large messages.
    copier: Copier
    #: The window of each channel.
    queue_bytes: int
    #: For the datagram that is read.
    buffer: bytearray
    #: Registers the memory of a new slot with the rank's device; the handle keeps it pinned.
    register: Callable[[Tensor], object]
    #: See `SlotPool`.
    make_room: Callable[[], None]
