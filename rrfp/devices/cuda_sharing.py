"""CUDA's IPC: memory from cudaMalloc, which other processes map. NOT RUN on CUDA yet.

Calls go to CUDA's runtime library by ctypes, which lets other Python threads run meanwhile; torch's own way shares
memory of its allocator, whose handles would be opened and closed for each tensor. Memory that another process may have
open is not freed, since CUDA promises nothing then: this process's next pipelines use it again.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rrfp.devices.base import DeviceSharing, SharedMemory
from rrfp.errors import FrameError
from rrfp.plain import Reader, blob, fields_of, whole

_HANDLE_BYTES = 64

#: cudaMemcpyDefault: the addresses say where the memory is.
_BY_ADDRESS = 4

#: cudaIpcMemLazyEnablePeerAccess: the memory may be another GPU's.
_WITH_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


_POINTER = ctypes.c_void_p
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cudaMalloc": (ctypes.POINTER(_POINTER), ctypes.c_size_t),
    "cudaFree": (_POINTER,),
    "cudaIpcGetMemHandle": (ctypes.POINTER(_Handle), _POINTER),
    "cudaIpcOpenMemHandle": (ctypes.POINTER(_POINTER), _Handle, ctypes.c_uint),
    "cudaIpcCloseMemHandle": (_POINTER,),
    "cudaMemcpyAsync": (_POINTER, _POINTER, ctypes.c_size_t, ctypes.c_int, _POINTER),
    "cudaGetLastError": (),
}


@cache
def _library() -> Any:
    # torch loads it with global symbols. Where it did not, its file is mapped all the same.
    library: Any = ctypes.CDLL(None)
    if not hasattr(library, "cudaIpcGetMemHandle"):
        lines = Path("/proc/self/maps").read_text().splitlines()
        path = next((line.split(maxsplit=5)[5] for line in lines if "libcudart" in line), None)
        if path is None:
            raise OSError("this process has no CUDA runtime library (libcudart) that can be called")
        library = ctypes.CDLL(path)
    for name, arguments in _ARGUMENTS.items():
        getattr(library, name).argtypes = arguments
    library.cudaGetErrorString.restype = ctypes.c_char_p
    return library


def _call(error: Callable[[str], Exception], name: str, *arguments: Any) -> None:
    library = _library()
    if status := getattr(library, name)(*arguments):
        library.cudaGetLastError()  # else the next kernel that torch launches on this thread would raise it
        raise error(f"{name}: {library.cudaGetErrorString(status).decode(errors='replace')}")


class CudaMemory(SharedMemory):
    """At an address."""

    def __init__(self, index: int, address: int, num_bytes: int, fields: Mapping[str, Any], *, is_own: bool) -> None:
        self.num_bytes = num_bytes
        self.fields = fields
        self._index = index
        self._address = address
        self._is_own = is_own

    def write(self, start: int, source: Tensor) -> object:
        return self._copy(self._address + start, source.data_ptr(), source)

    def read(self, start: int, target: Tensor) -> object:
        return self._copy(target.data_ptr(), self._address + start, target)

    def _copy(self, target: int, source: int, tensor: Tensor) -> Tensor:
        stream = torch.cuda.current_stream(self._index).cuda_stream
        _call(RuntimeError, "cudaMemcpyAsync", target, source, tensor.nbytes, _BY_ADDRESS, stream)
        return tensor

    def close(self, *, is_open_elsewhere: bool = True) -> None:
        if not self._is_own:
            _call(OSError, "cudaIpcCloseMemHandle", self._address)
        elif is_open_elsewhere:
            _idle[self._index, self.num_bytes].append((self._address, self.fields["handle"]))
        else:
            _call(OSError, "cudaFree", self._address)


class CudaSharing(DeviceSharing):
    """See `DeviceSharing`."""

    name = "cuda-ipc"

    def __init__(self, index: int) -> None:
        self._index = index

    def allocate(self, num_bytes: int) -> SharedMemory:
        try:
            address, handle = _idle[self._index, num_bytes].pop()
        except IndexError:
            address, handle = _new_memory(num_bytes)
        return CudaMemory(self._index, address, num_bytes, {"handle": handle, "size": num_bytes}, is_own=True)

    def check(self, fields: Mapping[str, Any]) -> int:
        """See `DeviceSharing.check`. A handle of nothing cannot be seen here: CUDA refuses to open it."""
        readers: dict[str, Reader] = {"handle": partial(blob, length=_HANDLE_BYTES), "size": partial(whole, least=1)}
        size: int = fields_of(fields, readers, error=partial(FrameError, None))["size"]
        return size

    def open(self, fields: Mapping[str, Any]) -> SharedMemory:
        pointer, handle = _POINTER(), _Handle.from_buffer_copy(fields["handle"])
        _call(OSError, "cudaIpcOpenMemHandle", ctypes.byref(pointer), handle, _WITH_PEER_ACCESS)
        return CudaMemory(self._index, pointer.value or 0, fields["size"], fields, is_own=False)


#: By device and size, the addresses and handles of memory that is not in use.
_idle: dict[tuple[int, int], list[tuple[int, bytes]]] = defaultdict(list)


def _new_memory(num_bytes: int) -> tuple[int, bytes]:
    pointer, handle = _POINTER(), _Handle()
    _call(OSError, "cudaMalloc", ctypes.byref(pointer), num_bytes)
    _call(OSError, "cudaIpcGetMemHandle", ctypes.byref(handle), pointer)
    return pointer.value or 0, bytes(handle)
