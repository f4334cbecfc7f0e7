"""CUDA's IPC: the only place that uses torch's private calls for it. NOT RUN on CUDA yet.

torch counts the openings of a shared storage, so that its memory is not reused before the other process has dropped it.
Its fields (torch 2.13): device, handle of the allocation, bytes of the storage, its offset in the allocation, name of
the file of counters and place in it, handle of an event behind the work so far, and whether to wait for that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rrfp.devices.sharing import DeviceSharing, check_fields, integer, refuse

#: Version, type, and CUDA's 64 bytes.
_HANDLE_LENGTH = 66
_EVENT_LENGTH = 64

#: The type of a handle of memory from cudaMalloc. Other allocations are opened by a descriptor of the other process.
_FROM_MALLOC = b"c"

#: torch's names of files with counters, and the number of counters in one.
_COUNTERS = re.compile(rb"/torch_[0-9]+_[0-9]+_[0-9]+")
_MOST_COUNTERS = 10_000


class CudaSharing(DeviceSharing):
    """See `DeviceSharing`."""

    name = "cuda-ipc"

    def __init__(self, index: int) -> None:
        self._index = index

    def share(self, tensor: Tensor) -> tuple[dict[str, Any], object]:
        """See `DeviceSharing.share`."""
        try:
            fields = self._share(tensor)
        except RuntimeError:
            # Memory that came from another process, or of another allocator: a copy is torch's own.
            try:
                tensor = tensor.clone()
                fields = self._share(tensor)
            except RuntimeError as error:
                raise OSError(f"torch cannot share this memory: {_first_line(error)}") from error
        return fields, tensor

    def _share(self, tensor: Tensor) -> dict[str, Any]:
        shared: Any = tensor.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
        _, handle, size, offset, counters, counter, event, waits = shared
        if len(handle) != _HANDLE_LENGTH or handle[1:2] != _FROM_MALLOC:
            # Shared already: without this, torch would keep the memory until another process has dropped it.
            torch.UntypedStorage._release_ipc_counter_cuda(counters, counter)
            raise OSError("it is no memory from cudaMalloc (expandable segments cannot be shared)")
        return {
            "handle": handle,
            "size": size,
            "offset": offset,
            "counters": counters,
            "counter": counter,
            "event": event,
            "waits": waits,
            "start": tensor.storage_offset() * tensor.itemsize,
            "length": tensor.nbytes,
        }

    def check(self, fields: Mapping[str, Any], num_bytes: int) -> None:
        """See `DeviceSharing.check`. An offset beyond the allocation cannot be seen here: it is the device's error."""
        check_fields(
            fields,
            {
                "handle": _check_handle,
                "size": integer(1),
                "offset": integer(),
                "counters": _check_counters,
                "counter": integer(0, _MOST_COUNTERS - 1),
                "event": partial(_check_bytes, length=_EVENT_LENGTH),
                "waits": _check_boolean,
                "start": integer(),
                "length": integer(num_bytes, num_bytes),
            },
        )
        if fields["start"] + num_bytes > fields["size"]:
            refuse("start", f"is {fields['start']}, must leave {num_bytes} of {fields['size']} bytes")

    def open(self, fields: Mapping[str, Any]) -> Tensor:
        """See `DeviceSharing.open`. Of two processes with one visible device each, both call theirs 0."""
        names = ("handle", "size", "offset", "counters", "counter", "event", "waits")
        try:
            storage = torch.UntypedStorage._new_shared_cuda(self._index, *(fields[name] for name in names))
            whole = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", self._index)).set_(storage)
        except RuntimeError as error:
            raise OSError(f"CUDA cannot open the memory: {_first_line(error)}") from error
        return whole[fields["start"] : fields["start"] + fields["length"]]


def _check_bytes(name: str, value: Any, length: int) -> None:
    if type(value) is not bytes or len(value) != length:
        refuse(name, f"is {value!r:.40}, must be {length} bytes")


def _check_handle(name: str, value: Any) -> None:
    _check_bytes(name, value, _HANDLE_LENGTH)
    if value[1:2] != _FROM_MALLOC:
        refuse(name, f"has the type {value[1:2]!r}, must be {_FROM_MALLOC!r}")


def _check_counters(name: str, value: Any) -> None:
    if type(value) is not bytes or _COUNTERS.fullmatch(value) is None:
        refuse(name, f"is {value!r:.80}, must be the name of a file of torch's counters")


def _check_boolean(name: str, value: Any) -> None:
    if type(value) is not bool:
        refuse(name, f"is {value!r:.80}, must be true or false")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]
