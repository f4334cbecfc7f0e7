"""What transports share to keep order and to bound memory: `Window` for senders, `Inbox` for the receiver.

Both belong to one event loop and may be fed from any thread. Waking a loop from its own thread costs no system call.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable

from rrfp.errors import RrfpError, TransportClosedError
from rrfp.transports.base import Message

#: What a message counts besides its tensors, in bytes, so that a queue of empty messages is bounded too.
MESSAGE_OVERHEAD = 512

CLOSED = "the transport is closed"

_Entry = tuple[Message | RrfpError, Callable[[], None] | None]


def cost_of(num_bytes: int) -> int:
    """Bytes that a message with so many tensor bytes takes of a window; sender and receiver compute the same."""
    return num_bytes + MESSAGE_OVERHEAD


class HomeLoop:
    """The loop that an object belongs to, and how to reach it from any thread. Make it on that loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._ident = threading.get_ident()

    def call(self, callback: Callable[[], object]) -> None:
        """Run ``callback`` on the loop: now when called from there, else soon; never when the loop is closed."""
        if threading.get_ident() == self._ident:
            callback()
        else:
            with contextlib.suppress(RuntimeError):  # closed: nobody waits there any more
                self.loop.call_soon_threadsafe(callback)


class Window:
    """Bytes sent to one peer on one channel that the peer has not yet consumed.

    One sender waits at a time (its channel's turn sees to that). A message larger than the limit travels alone.

    Args:
        limit: bytes that may be outstanding.
        home: the sender's loop.
    """

    def __init__(self, limit: int, home: HomeLoop) -> None:
        self._limit = limit
        self._home = home
        self._lock = threading.Lock()
        self._outstanding = 0
        self._messages = 0
        self._waiter: asyncio.Future[None] | None = None
        self._error: RrfpError | None = None

    @property
    def tensor_bytes(self) -> int:
        """Tensor bytes sent and not consumed."""
        return self._outstanding - self._messages * MESSAGE_OVERHEAD

    async def acquire(self, cost: int) -> None:
        """Wait until ``cost`` bytes fit, and take them. Cancelled: none are taken.

        Raises:
            RrfpError: the error that `fail` was given.
        """
        while not self.try_acquire(cost):
            assert self._waiter is not None
            try:
                await self._waiter
            finally:
                self._waiter = None

    def try_acquire(self, cost: int) -> bool:
        """Take ``cost`` bytes if they fit; otherwise get ready to be woken when something is released.

        Raises:
            RrfpError: the error that `fail` was given.
        """
        with self._lock:
            self.check()
            if self._outstanding == 0 or self._outstanding + cost <= self._limit:
                self._outstanding += cost
                self._messages += 1
                return True
            self._waiter = self._home.loop.create_future()
            return False

    def release(self, cost: int, messages: int = 1) -> None:
        """The peer consumed messages that cost ``cost`` bytes. Never drops below zero, whatever a peer claims."""
        with self._lock:
            self._outstanding = max(0, self._outstanding - cost)
            self._messages = max(0, self._messages - messages) if self._outstanding else 0
            waiting = self._waiter is not None
        if waiting:
            self._home.call(self._wake)

    def fail(self, error: RrfpError) -> None:
        """Make the waiting sender and every later one raise ``error``; the first error stays."""
        with self._lock:
            if self._error is None:
                self._error = error
        self._home.call(self._wake)

    def check(self) -> None:
        """Raise the error that `fail` was given, if any; a fresh one, since several senders may get it."""
        if self._error is not None:
            raise type(self._error)(*self._error.args)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Inbox:
    """Messages and errors that wait for ``receive``; control messages come first, the rest in order of arrival.

    Args:
        home: the receiver's loop.
    """

    def __init__(self, home: HomeLoop) -> None:
        self._home = home
        self._lock = threading.Lock()
        self._control: deque[_Entry] = deque()
        self._others: deque[_Entry] = deque()
        self._filled = asyncio.Event()
        self._idle = False
        self._closed = False

    def put(self, entry: Message | RrfpError, taken: Callable[[], None] | None = None, *, first: bool = False) -> None:
        """File a message, or an error to raise; from any thread.

        Args:
            entry: what ``take`` is to return or raise.
            taken: called on the receiver's loop when the entry is taken.
            first: overtake what is not `first`.
        """
        with self._lock:
            if self._closed:
                return
            (self._control if first else self._others).append((entry, taken))
            wake, self._idle = self._idle, False
        if wake:
            self._home.call(self._filled.set)

    async def take(self) -> Message:
        """The next message. Cancelling loses nothing.

        Raises:
            RrfpError: an error that was filed.
            TransportClosedError: if the inbox is closed.
        """
        while True:
            with self._lock:
                if self._closed:
                    raise TransportClosedError(CLOSED)
                queue = self._control or self._others
                if queue:
                    entry, taken = queue.popleft()
                    break
                self._idle = True
                self._filled.clear()
            await self._filled.wait()
        if taken is not None:
            taken()
        if isinstance(entry, RrfpError):
            raise entry
        return entry

    def close(self) -> None:
        """Drop everything; waiting and later ``take`` raise TransportClosedError."""
        with self._lock:
            self._closed = True
            self._control.clear()
            self._others.clear()
        self._home.call(self._filled.set)
