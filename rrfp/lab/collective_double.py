"""A double for a library whose sends and receives are kernels, as NCCL's: to run a transport's logic on a CPU.

A post only issues a kernel, on the stream of its edge; an event says when it is complete. A kernel needs one of the
few slots of its device, and holds it until the kernel at the other end of the edge has run beside it. Both ends match
by the order of their posts alone. In lazy mode a post blocks the host until the other end posts too.

The network sees all that is posted, so it knows when nothing can ever go on, and when a receive takes another transfer
than was meant. It then fails everything with one error that names the kernels and hosts.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rrfp.transports.carried.wires import EdgeName
from rrfp.transports.collective.streams import StreamWire
from rrfp.transports.header_checks import TensorSpec
from rrfp.transports.tensor_bytes import as_byte_tensor


class CollectiveDeadlockError(RuntimeError):
    """Kernels or hosts wait for each other, and nothing that is still to be posted could end that."""


class MismatchError(RuntimeError):
    """A receive was matched with another transfer's send: its data would be wrong."""


@dataclass(eq=False, slots=True)
class _Kernel:
    """A send or a receive that was posted."""

    #: Where.
    end: DoublePipe
    #: Of the transfer, as the transport counts; the library would not know it.
    number: int
    #: The bytes.
    piece: Tensor
    #: Of all posts in the network.
    order: int
    #: Whether it holds a slot.
    runs: bool = False

    def __str__(self) -> str:
        what = "send" if self.end.is_source else "receive"
        state = "runs" if self.runs else "is queued"
        size, rank = self.piece.nbytes, self.end.rank
        return f"rank {rank}'s {what} of {size} bytes, transfer {self.number} of {self.end.edge}, {state}"


@dataclass(eq=False)
class _Event:
    """Complete when ``count`` kernels of the end are."""

    end: DoublePipe
    count: int

    def synchronize(self) -> None:
        self.end.network.wait(self.end, lambda: self.end.completed >= self.count)


class DoubleNetwork:
    """All devices of a job, in this process."""

    def __init__(
        self,
        # Kernels that run on one device at a time.
        slots: int,
        *,
        # Whether a post blocks the host until the other end posts too.
        lazy: bool = False,
    ) -> None:
        #: The error that ended everything, if one did.
        self.failure: CollectiveDeadlockError | MismatchError | None = None
        self._slots = slots
        self._lazy = lazy
        self._changed = threading.Condition()
        self._ends: dict[tuple[EdgeName, bool], DoublePipe] = {}
        #: Hosts that are blocked in a post, with the end at which they post, and the number of the post there.
        self._blocked: dict[Hashable, tuple[DoublePipe, int]] = {}
        self._posts = itertools.count()

    def join(self, end: DoublePipe, timeout_s: float) -> None:
        """Add one end of an edge, and wait for the other."""
        with self._changed:
            self._ends[end.edge, end.is_source] = end
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: (end.edge, not end.is_source) in self._ends, timeout_s):
                raise RuntimeError(f"the other end of {end.edge} did not join")

    def post(self, end: DoublePipe, number: int, piece: Tensor) -> None:
        """Issue a kernel."""
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

    def abort(self, end: DoublePipe) -> None:
        """Fail what waits at one end; the other end does not notice."""
        with self._changed:
            end.aborted = True
            self._changed.notify_all()

    def wait(self, end: DoublePipe, condition: Callable[[], bool]) -> None:
        """Block a thread of ``end`` until ``condition`` holds, or a failure."""
        with self._changed:
            self._changed.wait_for(lambda: condition() or self.failure is not None or end.aborted)
            if self.failure is not None:
                raise type(self.failure)(*self.failure.args)
            if not condition():
                raise RuntimeError("the communicator was aborted")

    def _other(self, end: DoublePipe) -> DoublePipe:
        return self._ends[end.edge, not end.is_source]

    def _heads(self) -> list[_Kernel]:
        """The first incomplete kernel of each stream, in the order of posts."""
        return sorted((end.kernels[0] for end in self._ends.values() if end.kernels), key=lambda kernel: kernel.order)

    def _partner(self, kernel: _Kernel) -> _Kernel | None:
        """The posted kernel that it is matched with; both head their streams."""
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
        """The largest set of heads and hosts that wait for each other only."""
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
class DoublePipe:
    """One end of an edge."""

    #: Which it is a part of.
    network: DoubleNetwork
    edge: EdgeName
    #: Whether it sends.
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

    def __str__(self) -> str:
        what = "a send" if self.is_source else "a receive"
        return f"{what} of rank {self.rank} on {self.edge}"

    @property
    def rank(self) -> int:
        """Whose device its kernels run on."""
        return self.edge.source if self.is_source else self.edge.target

    def move(self, number: int, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self.network.post(self, number, as_byte_tensor(tensor))

    def record(self) -> _Event:
        return _Event(self, self.posts)

    def abort(self) -> None:
        self.network.abort(self)


class DoubleBackend:
    """The backend of one rank over a `DoubleNetwork`; tensors lie on the CPU."""

    name = "double"

    def __init__(self, network: DoubleNetwork, rank: int) -> None:
        self._network = network
        self._rank = rank

    def holds(self, tensor: Tensor) -> bool:
        return tensor.is_cpu

    def empty(self, spec: TensorSpec) -> Tensor:
        return torch.empty(spec.shape, dtype=spec.dtype, device="cpu")

    def connect(self, edge: EdgeName, store: object, timeout_s: float) -> StreamWire:
        pipe = DoublePipe(self._network, edge, self._rank == edge.source, host=(self._rank, edge))
        self._network.join(pipe, timeout_s)
        return StreamWire(pipe, edge)

    def close(self) -> None:
        """See `Backend.close`."""
