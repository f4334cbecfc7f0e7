"""Streams of the double, and the blocks in which work is issued on them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager

from torch import Tensor

from rrfp.compute.devices.base import Event, Stream
from rrfp.testing.device_double.memory import Memory, Segment
from rrfp.testing.device_double.regions import Clock, Work
from rrfp.testing.device_double.timeline import Barrier, DoubleError, DoubleEvent, Queue, Timeline
from rrfp.testing.device_double.watching import Watch


class DoubleStream(Stream):
    """A stream of the double. Made by `DoubleDevice.stream`."""

    def __init__(self, number: int, issuer: Issuer) -> None:
        self.number = number
        self.queue = Queue()
        #: The work that comes before what is issued next, this stream's own included.
        self.clock: Clock = {number: 0}
        self.has_strayed = False
        self._issuer = issuer

    @contextmanager
    def issuing(self) -> Iterator[None]:
        """See :meth:`Stream.issuing`. Blocks of all streams of the device exclude one another, but may be nested.

        Raises:
            DoubleError: if the device has failed.
        """
        self._issuer.enter(self)
        try:
            yield
        finally:
            self._issuer.leave(self)

    def make_current(self) -> None:
        """Issue the rest of the calling thread's block on this stream, as ``torch.cuda.set_stream`` does."""
        self._issuer.stray(self)

    @property
    def strayed(self) -> bool:
        """See :attr:`Stream.strayed`."""
        return self.has_strayed

    def record(self) -> Event:
        """See :meth:`Stream.record`; raises `DoubleError` if the device has failed."""
        return self._issuer.record(self)

    def wait(self, event: Event) -> None:
        """See :meth:`Stream.wait`; raises `DoubleError` if the device has failed."""
        assert isinstance(event, DoubleEvent)
        self._issuer.wait(self, event)


class Issuer:
    """Issues the work of all streams of one device.

    Args:
        timeline: runs it.
        memory: of the device.
        next_work: the seconds of the next piece of work, and whether it fails.
        report: takes problems.
    """

    def __init__(
        self,
        timeline: Timeline,
        memory: Memory,
        next_work: Callable[[], tuple[float, bool]],
        report: Callable[[str], None],
    ) -> None:
        self._timeline = timeline
        self._memory = memory
        self._next_work = next_work
        self._report = report
        #: Held by the thread that is inside blocks; they see different parts of one memory.
        self._blocks = threading.RLock()
        #: The streams of those blocks, the innermost last; its segment; and the thread.
        self._open: list[DoubleStream] = []
        self._segment: Segment | None = None
        self._thread: int | None = None
        self._watch = Watch(self._use, self._made)

    def current(self) -> DoubleStream | None:
        """The stream of the calling thread's innermost block; None outside blocks."""
        return self._open[-1] if self._thread == threading.get_ident() else None

    def enter(self, stream: DoubleStream) -> None:
        """Begin a block."""
        self._check_working()
        self._blocks.acquire()
        with self._timeline.changed:
            if stream in self._open:
                self._blocks.release()
                raise RuntimeError("issuing() is not reentrant, and this thread is in a block of the stream")
            self._end_segment()
            self._open.append(stream)
            self._thread = threading.get_ident()
            self._begin_segment()
        if len(self._open) == 1:
            self._watch.__enter__()  # type: ignore[no-untyped-call]

    def leave(self, stream: DoubleStream) -> None:
        """End a block."""
        if self._open[0] is stream:
            self._watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        with self._timeline.changed:
            self._end_segment()
            while (left := self._open.pop()) is not stream:
                stream.has_strayed = True
                self._wait(stream, self._new_event(left))
            if self._open:
                self._begin_segment()
            else:
                self._thread = None
        self._blocks.release()

    def stray(self, stream: DoubleStream) -> None:
        """Issue the rest of the block on ``stream``."""
        if self.current() is None:
            raise RuntimeError("a stream can be made current only inside a block")
        with self._timeline.changed:
            self._end_segment()
            self._open.append(stream)
            self._begin_segment()

    def record(self, stream: DoubleStream) -> DoubleEvent:
        """An event behind what was issued on ``stream``."""
        self._check_working()
        with self._cutting(stream):
            return self._new_event(stream)

    def wait(self, stream: DoubleStream, event: DoubleEvent) -> None:
        """Put ``event`` before what is issued on ``stream`` next."""
        self._check_working()
        event.use("waited for")
        with self._cutting(stream):
            self._wait(stream, event)

    @contextmanager
    def _cutting(self, stream: DoubleStream) -> Iterator[None]:
        """If the calling thread is in a block of ``stream``, the work issued so far comes before what is done here."""
        with self._timeline.changed:
            is_inside = self.current() is stream
            if is_inside:
                self._end_segment()
            yield
            if is_inside:
                self._begin_segment()

    def _new_event(self, stream: DoubleStream) -> DoubleEvent:
        event = DoubleEvent(self._report, dict(stream.clock))
        self._timeline.put(stream.queue, event)
        return event

    def _wait(self, stream: DoubleStream, event: DoubleEvent) -> None:
        for other, number in event.clock.items():
            stream.clock[other] = max(number, stream.clock.get(other, 0))
        self._timeline.put(stream.queue, Barrier(event))

    def _begin_segment(self) -> None:
        stream = self._open[-1]
        label = f"{threading.current_thread().name}'s work {stream.clock[stream.number] + 1} on stream {stream.number}"
        self._segment = Segment(stream.number, label, dict(stream.clock))
        self._memory.begin(self._segment)

    def _end_segment(self) -> None:
        segment, self._segment = self._segment, None
        if segment is None:
            return
        stream, work = self._open[-1], None
        if segment.read or segment.written:
            seconds, fails = self._next_work()
            stream.clock[stream.number] += 1
            work = Work(stream.number, stream.clock[stream.number], segment.label, seconds, fails)
        self._memory.end(segment, work)
        if work is not None:
            self._timeline.put(stream.queue, work)

    def allocate(self, tensor: Tensor, stream: DoubleStream | None) -> None:
        """See `Memory.allocate`."""
        with self._timeline.changed:
            is_inside = self.current() is not None
            number = None if stream is None else stream.number
            self._memory.allocate(tensor, number, self._segment if is_inside else None)

    def _use(self, operator: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        with self._timeline.changed:
            assert self._segment is not None
            self._memory.use(self._segment, operator, reads, writes)

    def _made(self, tensors: Sequence[Tensor], known: Set[int]) -> None:
        with self._timeline.changed:
            assert self._segment is not None
            self._memory.made(self._segment, tensors, known)

    def _check_working(self) -> None:
        if self._timeline.error is not None:
            raise DoubleError(self._timeline.error)
