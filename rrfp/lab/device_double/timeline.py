"""The device's time: when it reaches which point of which stream. One daemon thread, which ends when it is idle."""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rrfp.devices.base import Event
from rrfp.lab.device_double.regions import Clock, Work

#: The thread stays for so long after its last work.
LINGER_S = 0.05

#: Unlike `time.sleep` it holds the interpreter's lock, as calls of a driver may that wait.
_sleep_with_lock: Any = ctypes.PyDLL(None).usleep


class DoubleError(RuntimeError):
    """Work on the double has failed, as `DoubleDevice.fail` asked for. The device is unusable from then on."""


class DoubleEvent(Event):
    """A point in a stream; ``clock`` is all work before it."""

    def __init__(self, report: Callable[[str], None], clock: Clock, call: Callable[..., None]) -> None:
        self.clock = clock
        #: Whether it may be asked for its time.
        self.is_timed = False
        self._call = call
        self.issued = time.monotonic()
        self.time = math.nan
        self.error: str | None = None
        self._report = report
        self._reached = threading.Event()
        self._is_released = False

    @property
    def is_reached(self) -> bool:
        """Whether the device has got there, or has failed before."""
        return self._reached.is_set()

    def reach(self, moment: float, error: str | None = None) -> None:
        """The device has got there, or never will because of ``error``."""
        self.time, self.error = moment, error
        self._reached.set()

    def synchronize(self) -> None:
        """See :meth:`Event.synchronize`; raises `DoubleError`."""
        self.use("waited for")
        self._reached.wait()
        if self.error is not None:
            raise DoubleError(self.error)
        self._call(works_on_broken=True)

    def seconds_since(self, base: Event) -> float:
        assert isinstance(base, DoubleEvent)
        for event in (self, base):
            event.use("asked for its time")
            if not event.is_timed:
                self._report("an event was asked for its time that was recorded without")
            if not event.is_reached:
                self._report("an event was asked for its time before it was reached")
        return self.time - base.time

    def release(self) -> None:
        self.use("released")
        self._is_released = True

    def use(self, how: str) -> None:
        if self._is_released:
            self._report(f"an event was {how} after its release")


@dataclass(slots=True, eq=False)
class Queue:
    """The items of a stream that the device has not passed, in order, and when it passed the last one."""

    #: Work to run, events to reach, events to wait for.
    items: deque[tuple[Work, float] | DoubleEvent | Barrier] = field(default_factory=deque)
    #: The time of the last item passed.
    at: float = -math.inf


@dataclass(frozen=True, slots=True)
class Barrier:
    """The stream's further work runs behind ``event``."""

    event: DoubleEvent


class Timeline:
    """Passes the items of all streams at their times."""

    def __init__(
        self,
        # Called, under the lock, for each piece of work that the device has run.
        on_done: Callable[[Work], None],
        # Called, under the lock, when the device fails.
        on_broken: Callable[[], None],
        # How long a call holds the interpreter's lock.
        locked_s: float,
    ) -> None:
        #: The lock of everything that the device's thread and issuing threads share.
        self.changed = threading.Condition()
        #: Why the device has failed; None as long as it works.
        self.error: str | None = None
        #: Whether a failure reaches also what does not lie behind it.
        self.is_broken_everywhere = False
        self._on_done = on_done
        self._on_broken = on_broken
        self._locked_us = round(locked_s * 1e6)
        self._busy: set[Queue] = set()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def call(self, *, works_on_broken: bool = False) -> None:
        """A thread makes a call of the device; raises `DoubleError` if that has failed."""
        if self._locked_us:
            _sleep_with_lock(self._locked_us)
        if self.error is not None and (self.is_broken_everywhere or not works_on_broken):
            raise DoubleError(self.error)

    def put(self, queue: Queue, item: Work | DoubleEvent | Barrier) -> None:
        with self.changed:
            if self.error is not None:
                if isinstance(item, DoubleEvent):
                    item.reach(math.nan, self.error)
                return
            queue.items.append((item, time.monotonic()) if isinstance(item, Work) else item)
            self._busy.add(queue)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="rrfp-device-double", daemon=True)
                self._thread.start()
            self.changed.notify_all()

    def close(self) -> None:
        """Pass all items at once, now and later, and end the thread."""
        with self.changed:
            self._is_closed = True
            thread = self._thread
            self.changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _serve(self) -> None:
        with self.changed:
            while True:
                wake = self._pass()
                if self._busy:
                    self.changed.wait(None if math.isinf(wake) else max(0.0, wake - time.monotonic()))
                elif self._is_closed or (not self.changed.wait(LINGER_S) and not self._busy):
                    self._thread = None
                    return

    def _pass(self) -> float:
        """Pass all items that are due; returns when the next one is."""
        has_passed, wake = True, math.inf
        while has_passed and self._busy:
            has_passed, wake, now = False, math.inf, time.monotonic()
            for queue in list(self._busy):
                while queue.items and (due := self._due(queue)) <= now:
                    has_passed = True
                    self._pass_one(queue, due)
                if queue.items:
                    wake = min(wake, due)
                else:
                    self._busy.discard(queue)
        return wake

    def _due(self, queue: Queue) -> float:
        """When the first item of ``queue`` can be passed, if that is known."""
        item = queue.items[0]
        if isinstance(item, DoubleEvent):
            return max(queue.at, item.issued)
        if isinstance(item, Barrier):
            return max(queue.at, item.event.time) if item.event.is_reached else math.inf
        work, issued = item
        if work.ends is None:
            work.ends = max(queue.at, issued) + work.seconds
        return max(queue.at, issued) if self._is_closed else work.ends

    def _pass_one(self, queue: Queue, due: float) -> None:
        item = queue.items.popleft()
        queue.at = due
        if isinstance(item, DoubleEvent):
            item.reach(due)
        elif isinstance(item, tuple):
            work, _ = item
            if work.fails:
                self._break(work)
            else:
                self._on_done(work)

    def _break(self, work: Work) -> None:
        """The device fails: no stream goes on, no event is reached."""
        self.error = f"{work.label} failed on the device, as asked for"
        for queue in self._busy:
            for item in queue.items:
                if isinstance(item, DoubleEvent):
                    item.reach(math.nan, self.error)
            queue.items.clear()
        self._on_broken()
