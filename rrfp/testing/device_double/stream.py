"""Streams of the double, and the blocks in which work is issued on them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field

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
        #: Held by the thread that issues work on it in a block; several times, if it is current in several blocks.
        self.turn = threading.RLock()
        self._issuer = issuer

    @contextmanager
    def issuing(self) -> Iterator[None]:
        """See :meth:`Stream.issuing`. Threads whose blocks issue on one stream take turns; blocks may be nested.

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


@dataclass(slots=True, eq=False)
class Block:
    """A block of `Stream.issuing` that a thread is in.

    Attributes:
        stream: whose block it is.
        current: where work in the block goes now.
    """

    stream: DoubleStream
    current: DoubleStream


@dataclass(slots=True)
class Issuing:
    """One thread's part in issuing work.

    Attributes:
        watch: sees the operators in its blocks.
        blocks: those that the thread is in, the innermost last.
        segment: what the innermost issues; None outside blocks.
    """

    watch: Watch
    blocks: list[Block] = field(default_factory=list)
    segment: Segment | None = None

    @property
    def stream(self) -> DoubleStream | None:
        """Where the thread's work goes; None outside blocks."""
        return self.blocks[-1].current if self.blocks else None


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
        self._of_thread = threading.local()

    def current(self) -> DoubleStream | None:
        """The stream of the calling thread's innermost block; None outside blocks."""
        return self._here().stream

    def enter(self, stream: DoubleStream) -> None:
        """Begin a block."""
        self._check_working()
        here = self._here()
        if any(block.stream is stream for block in here.blocks):
            raise RuntimeError("issuing() is not reentrant, and this thread is in a block of the stream")
        stream.turn.acquire()  # as the block's stream
        stream.turn.acquire()  # as the current one
        with self._timeline.changed:
            self._end_segment(here)
            here.blocks.append(Block(stream, stream))
            self._begin_segment(here)
        if len(here.blocks) == 1:
            here.watch.__enter__()  # type: ignore[no-untyped-call]

    def leave(self, stream: DoubleStream) -> None:
        """End the innermost block, which is one of ``stream``."""
        here = self._here()
        if len(here.blocks) == 1:
            here.watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        with self._timeline.changed:
            self._end_segment(here)
            left = here.blocks.pop().current
            if left is not stream:
                stream.has_strayed = True
                self._wait(stream, self._new_event(left))
            self._begin_segment(here)
        left.turn.release()
        stream.turn.release()

    def stray(self, stream: DoubleStream) -> None:
        """Issue the rest of the block on ``stream``."""
        here = self._here()
        if not here.blocks:
            raise RuntimeError("a stream can be made current only inside a block")
        stream.turn.acquire()
        with self._timeline.changed:
            self._end_segment(here)
            left, here.blocks[-1].current = here.blocks[-1].current, stream
            self._begin_segment(here)
        left.turn.release()

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

    def allocate(self, tensor: Tensor, stream: DoubleStream | None) -> None:
        """See `Memory.allocate`."""
        with self._timeline.changed:
            number = None if stream is None else stream.number
            self._memory.allocate(tensor, number, self._here().segment)

    def _here(self) -> Issuing:
        """The calling thread's."""
        if not hasattr(self._of_thread, "issuing"):
            self._of_thread.issuing = Issuing(Watch(self._use, self._made))
        here: Issuing = self._of_thread.issuing
        return here

    @contextmanager
    def _cutting(self, stream: DoubleStream) -> Iterator[None]:
        """If the calling thread is in a block of ``stream``, the work issued so far comes before what is done here."""
        here = self._here()
        with self._timeline.changed:
            is_inside = here.stream is stream
            if is_inside:
                self._end_segment(here)
            yield
            if is_inside:
                self._begin_segment(here)

    def _new_event(self, stream: DoubleStream) -> DoubleEvent:
        event = DoubleEvent(self._report, dict(stream.clock))
        self._timeline.put(stream.queue, event)
        return event

    def _wait(self, stream: DoubleStream, event: DoubleEvent) -> None:
        for other, number in event.clock.items():
            stream.clock[other] = max(number, stream.clock.get(other, 0))
        self._timeline.put(stream.queue, Barrier(event))

    def _begin_segment(self, here: Issuing) -> None:
        """What the thread issues from here on; nothing, outside blocks."""
        if (stream := here.stream) is None:
            return
        label = f"{threading.current_thread().name}'s work {stream.clock[stream.number] + 1} on stream {stream.number}"
        here.segment = Segment(stream.number, label, dict(stream.clock))
        self._memory.begin(here.segment)

    def _end_segment(self, here: Issuing) -> None:
        segment, here.segment = here.segment, None
        stream, work = here.stream, None
        if segment is None or stream is None:
            return
        if segment.read or segment.written:
            seconds, fails = self._next_work()
            stream.clock[stream.number] += 1
            work = Work(stream.number, stream.clock[stream.number], segment.label, seconds, fails)
        self._memory.end(segment, work)
        if work is not None:
            self._timeline.put(stream.queue, work)

    def _use(self, operator: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        segment = self._here().segment
        assert segment is not None
        with self._timeline.changed:
            self._memory.use(segment, operator, reads, writes)

    def _made(self, tensors: Sequence[Tensor], known: Set[int]) -> None:
        segment = self._here().segment
        assert segment is not None
        with self._timeline.changed:
            self._memory.made(segment, tensors, known)

    def _check_working(self) -> None:
        if self._timeline.error is not None:
            raise DoubleError(self._timeline.error)
