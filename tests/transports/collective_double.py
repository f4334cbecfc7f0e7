"""A double for a library whose sends and receives are kernels, as NCCL's: to run a transport's logic on a CPU.

A post only issues a kernel, on the stream of its group; an event says when it is complete. A kernel needs one of the
few slots of its device, and holds it until the kernel at the other end of the group has run beside it. Both ends match
by the order of their posts alone. In lazy mode a post blocks the host until the other end posts too.

The network sees all that is posted, so it knows when nothing can ever go on, and when a receive takes another transfer
than was meant. It then fails everything with one error that names the kernels and hosts.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rrfp.devices.base import CopyLane
from rrfp.transports.collective.channel import RankPair
from rrfp.transports.links.flow import HomeLoop, settle
from rrfp.transports.wire.header_checks import TensorSpec
from rrfp.transports.wire.tensor_bytes import as_byte_tensor


class CollectiveDeadlockError(RuntimeError):
    """Kernels or hosts wait for each other, and nothing that is still to be posted could end that."""


class MismatchError(RuntimeError):
    """A receive was matched with the send of another transfer: its data would be wrong without a word."""


@dataclass(eq=False, slots=True)
class _Kernel:
    """A send or a receive that was posted."""

    end: DoubleGroup
    #: Of the transfer, as the transport counts; the library would not know it.
    number: int
    piece: Tensor
    #: Of all posts in the network.
    order: int
    #: Whether it holds a slot.
    runs: bool = False

    def __str__(self) -> str:
        what = "send" if self.end.is_source else "receive"
        state = "runs" if self.runs else "is queued"
        size, rank = self.piece.nbytes, self.end.rank
        return f"rank {rank}'s {what} of {size} bytes, transfer {self.number} of {self.end.pair}, {state}"


class DoubleNetwork:
    """All devices of a job, in this process; ``slots`` kernels run on one device at a time."""

    def __init__(self, slots: int, *, lazy: bool = False) -> None:
        #: The error that ended everything, if one did.
        self.failure: CollectiveDeadlockError | MismatchError | None = None
        self._slots = slots
        self._lazy = lazy
        self._changed = threading.Condition()
        self._ends: dict[tuple[RankPair, bool], DoubleGroup] = {}
        #: Hosts that are blocked in a post, with the end at which they post, and the number of the post there.
        self._blocked: dict[Hashable, tuple[DoubleGroup, int]] = {}
        self._posts = itertools.count()

    def join(self, end: DoubleGroup, timeout_s: float) -> None:
        """Add one end of a group, and wait for the other."""
        with self._changed:
            self._ends[end.pair, end.is_source] = end
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: (end.pair, not end.is_source) in self._ends, timeout_s):
                raise RuntimeError(f"the other end of {end.pair} did not join")

    def post(self, end: DoubleGroup, number: int, piece: Tensor) -> None:
        with self._changed:
            index, other = end.posts, self._other(end)
            end.posts += 1
            self._changed.notify_all()
            if self._lazy and other.posts <= index:
                self._blocked[end.host] = (end, index)
                self._find_deadlock()
                try:
                    self.wait(end, lambda: other.posts > index)
                finally:
                    del self._blocked[end.host]
            end.kernels.append(_Kernel(end, number, piece, next(self._posts)))
            while self._start() or self._complete():
                pass
            self._find_deadlock()
            self._changed.notify_all()

    def abort(self, end: DoubleGroup) -> None:
        """Fail what waits at one end; the other end does not notice."""
        with self._changed:
            end.aborted = True
            self._changed.notify_all()

    def wait(self, end: DoubleGroup, condition: Callable[[], bool]) -> None:
        """Block a thread of ``end`` until ``condition`` holds, or a failure."""
        with self._changed:
            self._changed.wait_for(lambda: condition() or self.failure is not None or end.aborted)
            if self.failure is not None:
                raise type(self.failure)(*self.failure.args)
            if not condition():
                raise RuntimeError("the communicator was aborted")

    def _other(self, end: DoubleGroup) -> DoubleGroup:
        return self._ends[end.pair, not end.is_source]

    def _heads(self) -> list[_Kernel]:
        """The first incomplete kernel of each stream, in the order of posts."""
        return sorted((end.kernels[0] for end in self._ends.values() if end.kernels), key=lambda kernel: kernel.order)

    def _partner(self, kernel: _Kernel) -> _Kernel | None:
        """The kernel at the other end that it is matched with, if that was posted; both are heads of their streams."""
        other = self._other(kernel.end)
        return other.kernels[0] if other.kernels and other.completed == kernel.end.completed else None

    def _running_on(self, rank: int) -> list[_Kernel]:
        return [kernel for kernel in self._heads() if kernel.runs and kernel.end.rank == rank]

    def _start(self) -> bool:
        for kernel in self._heads():
            if not kernel.runs and len(self._running_on(kernel.end.rank)) < self._slots:
                kernel.runs = True
                return True
        return False

    def _complete(self) -> bool:
        for kernel in self._heads():
            partner = self._partner(kernel)
            if partner is None or not kernel.end.is_source or not (kernel.runs and partner.runs):
                continue
            if kernel.piece.nbytes != partner.piece.nbytes:
                continue  # one of them waits for bytes that do not come
            if kernel.number != partner.number:
                self.failure = self.failure or MismatchError(f"{partner} gets the data of: {kernel}")
            partner.piece.copy_(kernel.piece)
            for each in (kernel, partner):
                each.end.kernels.pop(0)
                each.end.completed += 1
            return True
        return False

    def _find_deadlock(self) -> None:
        """The largest set of heads and hosts each of which waits for members of the set only."""
        stuck: set[object] = {*self._heads(), *self._blocked}
        while free := {each for each in stuck if not self._waits_within(each, stuck)}:
            stuck -= free
        if stuck and self.failure is None:
            names = [str(kernel) for kernel in self._heads() if kernel in stuck]
            names += [f"the host is blocked in {end}" for host, (end, _) in self._blocked.items() if host in stuck]
            self.failure = CollectiveDeadlockError("nothing can go on: " + "; ".join(sorted(names)))
            self._changed.notify_all()

    def _waits_within(self, each: object, stuck: set[object]) -> bool:
        """Whether ``each`` cannot go on before a member of ``stuck`` does."""
        if not isinstance(each, _Kernel):
            end, index = self._blocked[each]
            other = self._other(end)
            return other.posts <= index and other.host in stuck
        if not each.runs:
            return all(kernel in stuck for kernel in self._running_on(each.end.rank))
        partner = self._partner(each)
        return (self._other(each.end).host if partner is None else partner) in stuck


@dataclass(eq=False)
class DoubleGroup:
    """One end of a group."""

    network: DoubleNetwork
    pair: RankPair
    is_source: bool
    #: The thread that posts here. Several ends may share one.
    host: Hashable
    #: Those posted and not complete, in order.
    kernels: list[_Kernel] = field(default_factory=list)
    #: How many were posted, or are being posted.
    posts: int = 0
    #: How many are complete.
    completed: int = 0
    #: Whether nothing waits here any more.
    aborted: bool = False

    def __post_init__(self) -> None:
        self.lane: CopyLane = DoubleLane(self)

    def __str__(self) -> str:
        what = "a send" if self.is_source else "a receive"
        return f"{what} of rank {self.rank} on {self.pair}"

    @property
    def rank(self) -> int:
        """Whose device its kernels run on."""
        return self.pair.source if self.is_source else self.pair.target

    def move(self, number: int, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self.network.post(self, number, as_byte_tensor(tensor))

    def abort(self) -> None:
        self.network.abort(self)

    def wait(self, count: int) -> None:
        """Block until so many kernels that were posted here are complete."""
        self.network.wait(self, lambda: self.completed >= count)


class DoubleLane:
    """The lane of ``end``: makes calls on one thread, and waits on another until what they posted is complete."""

    def __init__(self, end: DoubleGroup) -> None:
        self._end = end
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = queue.SimpleQueue()
        self._issued: queue.SimpleQueue[tuple[int, asyncio.Future[Any]] | None] = queue.SimpleQueue()

    def start(self) -> None:
        self._home = HomeLoop()
        for name, serve in (("post", self._post), ("wait", self._wait)):
            threading.Thread(target=serve, name=f"rrfp-double-{self._end.pair}-{name}", daemon=True).start()

    def enqueue(self, call: Callable[[], Any]) -> asyncio.Future[Any]:
        done: asyncio.Future[Any] = self._home.loop.create_future()
        self._calls.put((call, done))
        return done

    def close(self, last: Callable[[], object] | None = None) -> None:
        assert last is None, "nothing closes with a group's lane"
        self._calls.put(None)

    def _post(self) -> None:
        while (item := self._calls.get()) is not None:
            call, done = item
            try:
                call()
            except Exception as error:
                self._settle(done, error)
            else:
                self._issued.put((self._end.posts, done))
            del item, call, done
        self._issued.put(None)

    def _wait(self) -> None:
        while (item := self._issued.get()) is not None:
            count, done = item
            try:
                self._end.wait(count)
            except Exception as error:
                self._settle(done, error)
            else:
                self._settle(done, None)
            del item, done

    def _settle(self, done: asyncio.Future[Any], error: Exception | None) -> None:
        self._home.call(partial(settle, done, error))


class DoubleBackend:
    """The backend of one rank over a `DoubleNetwork`; tensors lie on the CPU."""

    def __init__(self, network: DoubleNetwork, rank: int) -> None:
        self._network = network
        self._rank = rank

    def holds(self, tensor: Tensor) -> bool:
        return tensor.is_cpu

    def empty(self, spec: TensorSpec) -> Tensor:
        return torch.empty(spec.shape, dtype=spec.dtype, device="cpu")

    def connect(self, pair: RankPair, store: object, timeout_s: float) -> DoubleGroup:
        group = DoubleGroup(self._network, pair, self._rank == pair.source, host=(self._rank, pair))
        self._network.join(group, timeout_s)
        return group
