"""Streams of the double, and the blocks in which work is issued on them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch._dynamo  # the first dispatch mode would import it, for a second, perhaps on an event loop
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rrfp.devices.base import Event, Stream
from rrfp.lab.device_double.memory import Memory, Segment
from rrfp.lab.device_double.regions import Clock, Work, storages
from rrfp.lab.device_double.timeline import Barrier, DoubleEvent, Queue, Timeline

#: Called before an operator: its name, the tensors that it reads, and those that it writes.
Use = Callable[[str, Sequence[Tensor], Sequence[Tensor]], None]

#: Called after it: its results, and the keys of storages that are not new.
Made = Callable[[Sequence[Tensor], Set[int]], None]

_RUNNING = frozenset({"running_mean", "running_var"})
_BATCH_NORMS = frozenset({"aten::native_batch_norm", "aten::batch_norm", "aten::_batch_norm_impl_index"})


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reports the operators of a block."""

    def __init__(self, use: Use, made: Made) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._use = use
        self._made = made

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(map(_is_composed, types)):
            return NotImplemented  # the operators on its components follow
        reads = _tensors((args, kwargs))
        if func is torch.ops.aten.lift_fresh.default:  # a tensor that was made of Python's numbers
            self._made(reads, frozenset())
            return func(*args, **kwargs)
        self._use(str(func), reads, _tensors(_written(func, args, kwargs)))
        known = {storage._cdata for tensor in reads for storage in storages(tensor)}
        result = func(*args, **kwargs)
        self._made(_tensors(result), known)
        return result


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _is_composed(kind: type) -> bool:
    """Whether tensors of the type dispatch operators to their components."""
    return hasattr(kind, "__tensor_flatten__")


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterable[Any]:
    if func.namespace in ("c10d", "_c10d_functional"):  # a collective's schema does not say what it writes
        return (args, kwargs)
    places, names = _written_arguments(func)
    return [*(args[i] for i in places if i < len(args)), *(kwargs[name] for name in names if name in kwargs)]


@cache
def _written_arguments(func: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The positions and the names of the arguments that an operator writes."""
    # The schemas of most batch norms do not say that they write the running statistics.
    unsaid = _RUNNING if func._schema.name in _BATCH_NORMS else frozenset()
    written = [
        (i, argument.name)
        for i, argument in enumerate(func._schema.arguments)
        if argument.name in unsaid or (argument.alias_info is not None and argument.alias_info.is_write)
    ]
    return tuple(i for i, _ in written), tuple(name for _, name in written)


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
        """Threads whose blocks issue on one stream take turns; blocks may be nested."""
        self._issuer.enter(self)
        try:
            yield
        finally:
            self._issuer.leave(self)

    def make_current(self) -> None:
        """Issue the rest of this thread's block here, as ``torch.cuda.set_stream``."""
        self._issuer.stray(self)

    @property
    def strayed(self) -> bool:
        return self.has_strayed

    def record(self, *, is_timed: bool = False) -> Event:
        """See :meth:`Stream.record`; raises `DoubleError` if the device has failed."""
        return self._issuer.record(self, is_timed=is_timed)

    def wait(self, event: Event) -> None:
        """See :meth:`Stream.wait`; raises `DoubleError` if the device has failed."""
        assert isinstance(event, DoubleEvent)
        self._issuer.wait(self, event)


@dataclass(slots=True, eq=False)
class StreamBlock:
    """A block of `Stream.issuing` that a thread is in."""

    #: Whose block it is.
    stream: DoubleStream
    #: Where work in the block goes now.
    current: DoubleStream


@dataclass(slots=True)
class Issuing:
    """One thread's part in issuing work."""

    #: Sees the operators in its blocks.
    watch: Watch
    #: Those that the thread is in, the innermost last.
    blocks: list[StreamBlock] = field(default_factory=list)
    #: What the innermost issues; None outside blocks.
    segment: Segment | None = None

    @property
    def stream(self) -> DoubleStream | None:
        """Where the thread's work goes; None outside blocks."""
        return self.blocks[-1].current if self.blocks else None


class Issuer:
    """Issues the work of all streams of one device."""

    def __init__(
        self,
        timeline: Timeline,
        memory: Memory,
        # The seconds of the next piece of work, and whether it fails.
        next_work: Callable[[], tuple[float, bool]],
        # Takes problems.
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
        self._timeline.call()
        here = self._here()
        if any(block.stream is stream for block in here.blocks):
            raise RuntimeError("issuing() is not reentrant, and this thread is in a block of the stream")
        stream.turn.acquire()  # as the block's stream
        stream.turn.acquire()  # as the current one
        with self._timeline.changed:
            self._end_segment(here)
            here.blocks.append(StreamBlock(stream, stream))
            self._begin_segment(here)
        if len(here.blocks) == 1:
            here.watch.__enter__()  # type: ignore[no-untyped-call]

    def leave(self, stream: DoubleStream) -> None:
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
        here = self._here()
        if not here.blocks:
            raise RuntimeError("a stream can be made current only inside a block")
        stream.turn.acquire()
        with self._timeline.changed:
            self._end_segment(here)
            left, here.blocks[-1].current = here.blocks[-1].current, stream
            self._begin_segment(here)
        left.turn.release()

    def record(self, stream: DoubleStream, *, is_timed: bool = False) -> DoubleEvent:
        self._timeline.call()
        with self._cutting(stream):
            event = self._new_event(stream)
            event.is_timed = is_timed
            return event

    def wait(self, stream: DoubleStream, event: DoubleEvent) -> None:
        self._timeline.call()
        event.use("waited for")
        with self._cutting(stream):
            self._wait(stream, event)

    def allocate(self, tensor: Tensor, stream: DoubleStream | None) -> None:
        with self._timeline.changed:
            number = None if stream is None else stream.number
            self._memory.allocate(tensor, number, self._here().segment)

    def _here(self) -> Issuing:
        if not hasattr(self._of_thread, "issuing"):
            self._of_thread.issuing = Issuing(Watch(self._use, self._made))
        here: Issuing = self._of_thread.issuing
        return here

    @contextmanager
    def _cutting(self, stream: DoubleStream) -> Iterator[None]:
        """In a block of ``stream``, work issued so far comes before this."""
        here = self._here()
        with self._timeline.changed:
            is_inside = here.stream is stream
            if is_inside:
                self._end_segment(here)
            yield
            if is_inside:
                self._begin_segment(here)

    def _new_event(self, stream: DoubleStream) -> DoubleEvent:
        event = DoubleEvent(self._report, dict(stream.clock), self._timeline.call)
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
