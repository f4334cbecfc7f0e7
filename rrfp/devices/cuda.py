"""A CUDA device: thin calls of `torch.cuda`, so that all logic above it also runs over the double on a CPU."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from rrfp.devices.base import Device, DeviceMemory, Event, Stream
from rrfp.devices.cuda_sharing import CudaSharing


class CudaEvent(Event):
    """A pooled event that records time, and on which a thread blocks without spinning."""

    def __init__(self, index: int, pool: queue.SimpleQueue[CudaEvent]) -> None:
        # Why not torch.Event? Its flag `blocking` has no effect on CUDA; a thread that spins takes the driver's lock.
        self.event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        self._index = index
        self._pool = pool

    def synchronize(self) -> None:
        """See :meth:`Event.synchronize`; torch releases the GIL here, as `torch.cuda.Event.query` does not."""
        with torch.cuda.device(self._index):  # a new thread's is 0, on which CUDA would make a context
            self.event.synchronize()

    def seconds_since(self, base: Event) -> float:
        """See :meth:`Event.seconds_since`. A float32 of milliseconds: exact to 1 us for 8 s after ``base``."""
        assert isinstance(base, CudaEvent)
        milliseconds: float = base.event.elapsed_time(self.event)
        return milliseconds / 1e3

    def release(self) -> None:
        """See :meth:`Event.release`."""
        self._pool.put(self)


class CudaStream(Stream):
    """A stream of torch's pool, or the current one of a thread. Such streams do not wait for the default stream."""

    def __init__(self, device: CudaDevice, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self._device = device
        self._strayed = False

    @contextmanager
    def issuing(self) -> Iterator[None]:
        """See :meth:`Stream.issuing`."""
        # Why the device too? A thread's current one is 0 at first. Leaving the stream's block would go back to it by a
        # call that makes a CUDA context there, in every process of the host.
        with torch.cuda.device(self.stream.device), torch.cuda.stream(self.stream):
            try:
                yield
            finally:
                left = torch.cuda.current_stream(self.stream.device)
                if left != self.stream:
                    self._strayed = True
                    self.stream.wait_stream(left)

    @property
    def strayed(self) -> bool:
        """See :attr:`Stream.strayed`."""
        return self._strayed

    def record(self) -> Event:
        """See :meth:`Stream.record`."""
        event = self._device.event()
        event.event.record(self.stream)
        return event

    def wait(self, event: Event) -> None:
        """See :meth:`Stream.wait`."""
        assert isinstance(event, CudaEvent)
        self.stream.wait_event(event.event)


class CudaDevice(Device):
    """One CUDA device of this process."""

    kind = "cuda"

    def __init__(self, index: int | None = None) -> None:
        self.index = torch.cuda.current_device() if index is None else index
        self.name = f"cuda:{self.index}"
        self.sharing = CudaSharing(self.index)
        #: Creating an event can take milliseconds, while another thread holds the context's lock.
        self._events: queue.SimpleQueue[CudaEvent] = queue.SimpleQueue()

    def event(self) -> CudaEvent:
        """An event of the pool, not recorded."""
        try:
            return self._events.get_nowait()
        except queue.Empty:
            return CudaEvent(self.index, self._events)

    def stream(self, *, is_urgent: bool = False) -> Stream:
        """See :meth:`Device.stream`."""
        stream = torch.cuda.Stream(self.index, priority=-1 if is_urgent else 0)  # type: ignore[no-untyped-call]
        return CudaStream(self, stream)

    def current_stream(self) -> Stream:
        """See :meth:`Device.current_stream`."""
        return CudaStream(self, torch.cuda.current_stream(self.index))

    def holds(self, tensor: Tensor) -> bool:
        """See :meth:`Device.holds`."""
        return tensor.is_cuda and tensor.get_device() == self.index

    def note_use(self, tensor: Tensor, stream: Stream) -> None:
        """See :meth:`Device.note_use`."""
        assert isinstance(stream, CudaStream)
        for part in _dense_parts(tensor):
            part.record_stream(stream.stream)

    def empty(self, tensor: Tensor) -> Tensor:
        """See :meth:`Device.empty`."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=torch.device("cuda", self.index))

    def empty_on_host(self, tensor: Tensor) -> Tensor:
        """See :meth:`Device.empty_on_host`; torch's allocator pools pinned memory."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)

    def pin(self, memory: Tensor) -> bool:
        """See :meth:`Device.pin`."""
        with torch.cuda.device(self.index):
            status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)  # type: ignore[no-untyped-call]
        return int(status) == 0

    def unpin(self, memory: Tensor) -> None:
        """See :meth:`Device.unpin`."""
        with torch.cuda.device(self.index):
            torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]

    def memory(self) -> DeviceMemory:
        """See :meth:`Device.memory`."""
        allocated = torch.cuda.memory_allocated(self.index)
        return DeviceMemory(
            allocated, torch.cuda.memory_reserved(self.index), torch.cuda.max_memory_allocated(self.index)
        )

    def explain(self, error: Exception) -> Exception:
        """See :meth:`Device.explain`."""
        error.add_note(
            "kernels run later than they are launched: this task, or its Python line, may be a later one than the "
            "traceback shows; CUDA_LAUNCH_BLOCKING=1 shows the line"
        )
        return error


def _dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The dense tensors of which ``tensor`` consists."""
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
