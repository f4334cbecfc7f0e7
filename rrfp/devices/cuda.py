"""A CUDA device: thin calls of `torch.cuda`, so that all logic above it also runs over the double on a CPU."""

from __future__ import annotations

import ctypes
import queue
import sys
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from rrfp.devices.base import Device, DeviceMemory, Event, Stream
from rrfp.devices.cuda_sharing import CudaSharing

#: A reference to a storage that does not keep it alive; torch has no types for it.
_WeakStorage: Any = reductions.StorageWeakRef

#: At the greatest depth that is of use, 3, so many events are in use.
_EVENTS = 2 * (3 + 2)

#: Streams of lanes that are gone, by device and urgency. torch has 32 of each urgency, and then gives one out again.
_idle_streams: dict[tuple[int, bool], list[torch.cuda.Stream]] = defaultdict(list)


@cache
def _runtime() -> Any:
    """CUDA's runtime, as torch has loaded it; None if its functions are not to be found by name."""
    with_functions = ctypes.CDLL(None)
    try:
        with_functions.cudaGetLastError.restype = with_functions.cudaEventElapsedTime.restype = ctypes.c_int
    except AttributeError:  # linked into torch, or ROCm's
        return None
    with_functions.cudaEventElapsedTime.argtypes = [ctypes.POINTER(ctypes.c_float), ctypes.c_void_p, ctypes.c_void_p]
    return with_functions


class CudaEvent(Event):
    """A pooled event on which a thread blocks without spinning."""

    def __init__(self, index: int, pool: queue.SimpleQueue[CudaEvent], *, is_timed: bool) -> None:
        # Why not torch.Event? Its flag `blocking` has no effect on CUDA; a thread that spins takes the driver's lock.
        self.event = torch.cuda.Event(enable_timing=is_timed, blocking=True)  # type: ignore[no-untyped-call]
        self._index = index
        self._pool = pool
        self._kept: StreamMemory | None = None
        self._number = 0

    def record(self, stream: torch.cuda.Stream, kept: StreamMemory) -> None:
        """Mark the end of ``stream``, on whose work ``kept`` waits."""
        self._kept, self._number = kept, kept.mark()
        self.event.record(stream)

    def synchronize(self) -> None:
        """See :meth:`Event.synchronize`; torch releases the GIL here, as `torch.cuda.Event.query` does not."""
        with torch.cuda.device(self._index):  # a new thread's is 0, on which CUDA would make a context
            self.event.synchronize()
        if self._kept is not None:
            self._kept.reached(self._number)

    def seconds_since(self, base: Event) -> float:
        """See :meth:`Event.seconds_since`. A float32 of milliseconds: exact to 1 us for 8 s after ``base``."""
        assert isinstance(base, CudaEvent)
        milliseconds = ctypes.c_float()
        # torch's method makes three calls of the driver, and under the GIL; this is one, and without.
        if (runtime := _runtime()) is not None:
            first, last = base.event.cuda_event, self.event.cuda_event
            if runtime.cudaEventElapsedTime(ctypes.byref(milliseconds), first, last) == 0:
                return milliseconds.value / 1e3
            runtime.cudaGetLastError()  # torch's method raises it with its text
        elapsed: float = base.event.elapsed_time(self.event)
        return elapsed / 1e3

    def release(self) -> None:
        self._kept = None
        self._pool.put(self)


class StreamMemory:
    """The memory that work on one stream may use, though the stream did not make it. Thread-safe.

    Why not torch's `record_stream`? It has the allocator record and query events when memory is freed and made. On a
    device that has failed the first raises in a destructor, which ends the process before anybody names the task, and
    the second, asked twice, reads a null pointer. Here the memory is referred to until an event that was recorded after
    everybody else had dropped it has been reached; where none is reached any more, it stays.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._used: dict[int, torch.UntypedStorage] = {}
        self._dropped: deque[tuple[int, torch.UntypedStorage]] = deque()
        self._marks = 0

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        with self._lock:
            self._used[storage._cdata] = storage

    def mark(self) -> int:
        """The number of a new event on the stream."""
        with self._lock:
            self._marks += 1
            for key in list(self._used):
                storage = self._used[key]
                if _is_alone(storage):
                    self._dropped.append((self._marks, storage))
                    del self._used[key]
            return self._marks

    def reached(self, number: int) -> None:
        freed = []
        with self._lock:
            while self._dropped and self._dropped[0][0] <= number:
                freed.append(self._dropped.popleft())

    def free(self, stream: torch.cuda.Stream) -> None:
        """No event will be recorded any more: leave to torch what is left."""
        with self._lock:
            left = [*self._used.values(), *(storage for _, storage in self._dropped)]
            self._used.clear()
            self._dropped.clear()
        for storage in left:
            _note(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage), stream)


#: References to a storage of which `StreamMemory.mark` knows: in the dictionary, as its local, as those of `_is_alone`.
_OWN_REFERENCES = 4


def _is_alone(storage: torch.UntypedStorage) -> bool:
    """Whether neither a tensor nor anybody else's Python object refers to the memory."""
    uses: int = torch._C._storage_Use_Count(storage._cdata)
    return uses == 1 and sys.getrefcount(storage) <= _OWN_REFERENCES


class _Noted:
    """Memory of this process whose freeing makes a call of CUDA. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._storages: dict[int, Any] = {}
        self._swept = 0
        self._keeps_all = False

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        with self._lock:
            if self._keeps_all:
                _never_free(storage)
                return
            known = self._storages.get(storage._cdata)
            if known is not None and not known.expired():
                return
            self._storages[storage._cdata] = _WeakStorage(storage)
            if len(self._storages) > 2 * self._swept + 100:
                self._storages = {key: ref for key, ref in self._storages.items() if not ref.expired()}
                self._swept = len(self._storages)

    def keep_all(self) -> None:
        """Let nothing that lives be freed any more, nor what is noted from now on."""
        with self._lock:
            self._keeps_all = True
            for ref in self._storages.values():
                storage: Any = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
                if storage is not None:
                    _never_free(storage)
            self._storages.clear()


def _never_free(storage: torch.UntypedStorage) -> None:
    # A reference that nothing drops, not even the end of the interpreter.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(storage))


_noted = _Noted()


def _note(tensor: Tensor, stream: torch.cuda.Stream) -> None:
    """Let torch keep the memory of a dense tensor from reuse."""
    tensor.record_stream(stream)
    _noted.add(tensor)


class CudaStream(Stream):
    """A stream of torch's pool, or the current one of a thread. Such streams do not wait for the default stream."""

    def __init__(self, device: CudaDevice, stream: torch.cuda.Stream, *, is_own: bool = False) -> None:
        self.stream = stream
        #: Whether events on it are recorded regularly, so that memory can wait for them.
        self.is_own = is_own
        self.kept = StreamMemory()
        self._device = device
        self._strayed = False

    @contextmanager
    def issuing(self) -> Iterator[None]:
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
        return self._strayed

    def record(self, *, is_timed: bool = False) -> Event:
        event = self._device.event(is_timed=is_timed)
        event.record(self.stream, self.kept)
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self.stream.wait_event(event.event)


class CudaDevice(Device):
    """One CUDA device of this process."""

    kind = "cuda"

    def __init__(self, index: int | None = None) -> None:
        self.index = torch.cuda.current_device() if index is None else index
        self.name = f"cuda:{self.index}"
        self.sharing = CudaSharing(self.index)
        #: By whether they have times. Creating one can take milliseconds, while another thread has the context's lock.
        self._events: dict[bool, queue.SimpleQueue[CudaEvent]] = {
            is_timed: queue.SimpleQueue() for is_timed in (False, True)
        }

    def event(self, *, is_timed: bool = False) -> CudaEvent:
        """An event of the pool, not recorded."""
        pool = self._events[is_timed]
        try:
            return pool.get_nowait()
        except queue.Empty:
            return CudaEvent(self.index, pool, is_timed=is_timed)

    def stream(self, *, is_urgent: bool = False) -> Stream:
        """See :meth:`Device.stream`; one that served before, if nobody has it any more."""
        idle = _idle_streams[self.index, is_urgent]
        try:
            stream = idle.pop()
        except IndexError:
            stream = torch.cuda.Stream(self.index, priority=-1 if is_urgent else 0)  # type: ignore[no-untyped-call]
        made = CudaStream(self, stream, is_own=True)
        weakref.finalize(made, _give_back, idle, stream, made.kept).atexit = False
        # torch makes an event when it is first recorded: now, and not under load.
        for event in [made.record(is_timed=not is_urgent) for _ in range(_EVENTS)]:
            event.release()
        return made

    def current_stream(self) -> Stream:
        return CudaStream(self, torch.cuda.current_stream(self.index))

    def holds(self, tensor: Tensor) -> bool:
        return tensor.is_cuda and tensor.get_device() == self.index

    def note_use(self, tensor: Tensor, stream: Stream) -> None:
        assert isinstance(stream, CudaStream)
        for part in _dense_parts(tensor):
            if stream.is_own:
                stream.kept.add(part)
            else:
                _note(part, stream.stream)

    def keep_noted(self) -> None:
        """See :meth:`Device.keep_noted`; torch's pinned memory is freed as noted memory is."""
        _noted.keep_all()

    def empty(self, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=torch.device("cuda", self.index))

    def empty_on_host(self, tensor: Tensor) -> Tensor:
        """See :meth:`Device.empty_on_host`; torch's allocator pools pinned memory."""
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        _noted.add(made)
        return made

    def pin(self, memory: Tensor) -> bool:
        if (runtime := _runtime()) is None:
            return False
        with torch.cuda.device(self.index):
            status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)  # type: ignore[no-untyped-call]
        if int(status) == 0:
            return True
        # CUDA keeps the error for this thread, whose next launch of a kernel would raise it.
        runtime.cudaGetLastError()
        return False

    def unpin(self, memory: Tensor) -> None:
        with torch.cuda.device(self.index):
            torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]

    def memory(self) -> DeviceMemory:
        allocated = torch.cuda.memory_allocated(self.index)
        return DeviceMemory(
            allocated, torch.cuda.memory_reserved(self.index), torch.cuda.max_memory_allocated(self.index)
        )

    def explain(self, error: Exception) -> Exception:
        error.add_note(
            "kernels run later than they are launched: this task, or its Python line, may be a later one than the "
            "traceback shows; CUDA_LAUNCH_BLOCKING=1 shows the line"
        )
        return error


def _give_back(idle: list[torch.cuda.Stream], stream: torch.cuda.Stream, kept: StreamMemory) -> None:
    """Nobody has a stream any more: it may serve others, behind what it still does."""
    kept.free(stream)
    idle.append(stream)


def _dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
