"""Flow control shared by the transports: a `Window` for each sender, an `Inbox` for the receiver.

Both belong to one event loop and accept calls from any thread. The receiver returns credit when ``receive`` returns a
message, or it is passed on at once: a receiver that is slow, or blocked by its caller, thus slows its senders down, and
its memory is bounded by its peers' windows.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from rrfp import timeouts
from rrfp.errors import RrfpError, TransportClosedError
from rrfp.transports.base import Channel, Deliver, Message
from rrfp.transports.wire.header_checks import HeaderChecks

#: Bytes that each message counts beside its tensors, so that a queue of empty messages is bounded too.
MESSAGE_OVERHEAD = 512

CLOSED = "the transport is closed"

_Result = TypeVar("_Result")

_Entry = tuple[Message | RrfpError, Callable[[], None] | None]


def cost_of(num_bytes: int) -> int:
    """The bytes of a window that a message takes; sender and receiver compute the same.

    Args:
        num_bytes: of its tensors.
    """
    return num_bytes + MESSAGE_OVERHEAD


class HomeLoop:
    """The loop that an object belongs to, reachable from any thread. Create it on that loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._ident = threading.get_ident()

    def call(self, callback: Callable[[], object]) -> None:
        """Run a function on the loop: now when called there, else soon; never when the loop is closed.

        Args:
            callback: the function.
        """
        # Waking the loop from its own thread would cost a system call for its self-pipe.
        if threading.get_ident() == self._ident:
            callback()
        else:
            with contextlib.suppress(RuntimeError):  # closed: its waiters are gone
                self.loop.call_soon_threadsafe(callback)


def settle(future: asyncio.Future[_Result], error: BaseException | None, result: Any = None) -> None:
    """Complete a future on its loop, unless it was given up."""
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


def background(receiving: Coroutine[Any, Any, _Result]) -> asyncio.Task[_Result]:
    """A task that receives, whose error may go unread when the transport closes."""
    task: asyncio.Task[_Result] = asyncio.create_task(receiving)
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    return task


async def to_its_end(task: asyncio.Task[None]) -> None:
    """Wait for the end of a task, also when cancelled meanwhile."""
    is_cancelled = False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            is_cancelled = True
    if is_cancelled:
        raise asyncio.CancelledError
    task.result()


class Window:
    """Bytes sent to one peer on one channel that the peer has not yet consumed.

    At most one sender waits, as each channel has a lock for senders. A message larger than the limit travels alone: it
    waits until nothing is outstanding, since it would never fit.

    Args:
        limit: bytes of tensors that may be outstanding, and bytes that messages may count beside them.
        home: the sender's loop.
        ask: called there whenever a sender begins to wait, also after a `release` that was not enough: has the peer
            return what it has consumed, if it would not do so at once.
    """

    def __init__(self, limit: int, home: HomeLoop, ask: Callable[[], None] | None = None) -> None:
        self._limit = limit
        self._home = home
        self._ask = ask
        self._lock = threading.Lock()
        self._outstanding = 0
        self._messages = 0
        self._waiter: asyncio.Future[None] | None = None
        self._error: RrfpError | None = None

    @property
    def tensor_bytes(self) -> int:
        """Tensor bytes sent and not consumed."""
        with self._lock:  # a call of `release` on another thread changes both
            return max(0, self._outstanding - self._messages * MESSAGE_OVERHEAD)  # the numbers are the peer's

    async def acquire(self, cost: int) -> None:
        """Wait until some bytes fit, and acquire them. Cancelled, it acquires none.

        Args:
            cost: the bytes; see `cost_of`.

        Raises:
            RrfpError: the error passed to `fail`.
        """
        while (waiter := self._acquire_or_wait(cost)) is not None:
            try:
                if self._ask is not None:
                    self._ask()
                await waiter
            finally:
                self._waiter = None

    def try_acquire(self, cost: int) -> bool:
        """Acquire some bytes if they fit now.

        Args:
            cost: the bytes; see `cost_of`.

        Returns:
            Whether they were acquired.

        Raises:
            RrfpError: the error passed to `fail`.
        """
        with self._lock:
            self.check()
            # The overhead of messages has a limit of its own, so that two of half the limit fit.
            overhead = (self._messages + 1) * MESSAGE_OVERHEAD
            fits = self._outstanding == 0 or (
                self._outstanding + cost - overhead <= self._limit and overhead <= self._limit
            )
            if fits:
                self._outstanding += cost
                self._messages += 1
            return fits

    def _acquire_or_wait(self, cost: int) -> asyncio.Future[None] | None:
        """None once the bytes are acquired; else the future that `release` completes."""
        if self.try_acquire(cost):
            return None
        waiter = self._waiter = self._home.loop.create_future()
        if not self.try_acquire(cost):  # another thread may have released some before there was a waiter
            return waiter
        self._waiter = None
        return None

    def release(self, cost: int, messages: int = 1) -> None:
        """Release bytes of messages that the peer consumed; from any thread.

        Args:
            cost: the bytes; clamped to those outstanding, since the numbers are the peer's.
            messages: the number of messages; clamped likewise.
        """
        with self._lock:
            self._outstanding = max(0, self._outstanding - cost)
            self._messages = max(0, self._messages - messages) if self._outstanding else 0
            waiting = self._waiter is not None
        if waiting:
            self._home.call(self._wake)

    def fail(self, error: RrfpError) -> None:
        """Make the waiting sender and all later ones raise an error; from any thread. The first error stays.

        Args:
            error: each sender raises a copy of it.
        """
        with self._lock:
            if self._error is None:
                self._error = error
        self._home.call(self._wake)

    def check(self) -> None:
        """Raise the error passed to `fail`, if any."""
        if self._error is not None:  # a copy: several senders may raise it, and a traceback belongs to one of them
            raise type(self._error)(*self._error.args)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Inbox:
    """Messages and errors that wait for ``receive``: control messages first, the others in order of arrival.

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
        self._deliver: Deliver | None = None

    def put(
        self, entry: Message | RrfpError, on_received: Callable[[], None] | None = None, *, first: bool = False
    ) -> None:
        """Append a message for `get` to return, or an error to raise; from any thread.

        Args:
            entry: the message or error.
            on_received: called on the receiver's loop when `get` removes the entry.
            first: overtakes the entries that are not ``first``.
        """
        with self._lock:
            if self._closed:
                return
            deliver = self._deliver
            if deliver is None:
                (self._control if first else self._others).append((entry, on_received))
            wake, self._idle = self._idle, False
        if deliver is not None:
            self._home.call(partial(self._pass_on, entry, on_received, deliver))
        elif wake:
            self._home.call(self._filled.set)

    def deliver_to(self, deliver: Deliver) -> None:
        """Call a function with each entry, those that wait first, in place of `get`. Called on the loop, once.

        Args:
            deliver: called on the loop, and in calls of `put` that are made there.
        """
        while True:
            with self._lock:  # another thread that puts an entry sees the function, or has its entry seen here
                entries = self._control or self._others
                if not entries:
                    self._deliver = deliver
                    return
                entry, on_received = entries.popleft()
            self._pass_on(entry, on_received, deliver)

    def _pass_on(self, entry: Message | RrfpError, on_received: Callable[[], None] | None, deliver: Deliver) -> None:
        if self._closed:
            return
        if on_received is not None:
            on_received()
        deliver(entry)

    async def get(self) -> Message:
        """Wait for the next message. Cancelling loses nothing: an entry is removed only when nothing is awaited after.

        Returns:
            The next message: control messages first, the others in order of arrival.

        Raises:
            RrfpError: an error passed to `put`.
            TransportClosedError: if the inbox is closed.
        """
        while True:
            with self._lock:
                if self._closed:
                    raise TransportClosedError(CLOSED)
                queue = self._control or self._others
                if queue:
                    entry, on_received = queue.popleft()
                    break
                self._idle = True
                self._filled.clear()
            await self._filled.wait()
        if on_received is not None:
            on_received()
        if isinstance(entry, RrfpError):
            raise entry
        return entry

    def close(self) -> None:
        """Drop all entries; waiting and later `get` raise TransportClosedError."""
        with self._lock:
            self._closed = True
            self._control.clear()
            self._others.clear()
        self._home.call(self._filled.set)


#: The part of the sender's window after which credit is sent at once.
CREDIT_SHARE = 2


class _Debt:
    """Bytes and messages that were consumed, and for which no credit was sent yet."""

    def __init__(self) -> None:
        self.cost = 0
        self.messages = 0
        self.timer: asyncio.TimerHandle | None = None


class Credits:
    """Returns the bytes of received messages to one sender's window. Used on one loop only."""

    # One frame covers many messages: it is sent once it is half of the sender's window, or when the sender has to wait
    # and asks for it, so that no sender waits for the timer. The timer only keeps ``queued_bytes`` true.

    def __init__(self, queue_bytes: int, send: Callable[[str, int, int], None]) -> None:
        self._threshold = queue_bytes // CREDIT_SHARE
        self._send = send
        self._debts = {channel: _Debt() for channel in Channel}
        #: Channels whose sender waits, and nothing was consumed since.
        self._wanted: set[Channel] = set()
        self._closed = False

    def consumed(self, channel: Channel, num_bytes: int) -> None:
        """``receive`` returned a message of ``channel`` with so many bytes of tensors."""
        debt = self._debts[channel]
        debt.cost += cost_of(num_bytes)
        debt.messages += 1
        if debt.cost >= self._threshold or channel in self._wanted:
            self._flush(channel)
        elif debt.timer is None and not self._closed:
            loop = asyncio.get_running_loop()
            debt.timer = loop.call_later(timeouts.CREDIT_DELAY_S, self._flush, channel)

    def want(self, sender: int, name: str, fields: Any) -> None:
        """The peer waits for room: answer once there is credit."""
        check = HeaderChecks(sender)
        (value,) = check.array(name, fields, 1)
        channel = check.choice(f"{name}.channel", value, Channel)
        if self._debts[channel].messages:
            self._flush(channel)
        else:
            self._wanted.add(channel)

    def _flush(self, channel: Channel) -> None:
        self._wanted.discard(channel)
        debt, self._debts[channel] = self._debts[channel], _Debt()
        if debt.timer is not None:
            debt.timer.cancel()
        if not self._closed:
            self._send(channel.value, debt.cost, debt.messages)

    def close(self) -> None:
        """Send nothing more. May be called twice."""
        self._closed = True
        for debt in self._debts.values():
            if debt.timer is not None:
                debt.timer.cancel()


def grant(sender: int, name: str, fields: Any, window_of: Callable[[Channel], Window]) -> None:
    """Release the bytes of a credit; a FrameError if it is malformed."""
    check = HeaderChecks(sender)
    channel, cost, messages = check.array(name, fields, 3)
    window = window_of(check.choice(f"{name}.channel", channel, Channel))
    window.release(check.integer(f"{name}.bytes", cost), check.integer(f"{name}.messages", messages))
