"""The double's memory for other processes: a copy in a memfd, which both ends map.

The copy is work of the stream on which it is issued, so a process that opens it too early reads 0xFF. When its owner
drops it, it is overwritten with 0xFF at once, as a GPU's allocator may reuse memory: a stream that still reads it, or
reads what was dropped where it was opened, shows in values or among the double's problems. What was opened stays mapped
after the death of its owner.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from rrfp.compute.devices.sharing import DeviceSharing, check_fields, integer


class _Shared:
    """Bytes in a memfd that stay as they are while anything refers to this object."""

    def __init__(self, num_bytes: int) -> None:
        self.descriptor = os.memfd_create("rrfp-device-double", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, num_bytes)
        self.inode = os.fstat(self.descriptor).st_ino
        self.content = _map(self.descriptor, num_bytes)
        # A forked child maps the same memory, and must not overwrite it when it ends.
        weakref.finalize(self, _reuse, self.content, self.descriptor, os.getpid()).atexit = False


def _map(descriptor: int, num_bytes: int) -> Tensor:
    array: Any = np.frombuffer(mmap.mmap(descriptor, num_bytes), np.uint8)
    with _disable_current_modes():  # else the memory would count as made by the stream whose block this is
        return torch.from_numpy(array)


def _reuse(content: Tensor, descriptor: int, process: int) -> None:
    if os.getpid() == process:
        content.numpy().fill(0xFF)  # not by torch, to which a dispatch mode may listen
        os.close(descriptor)


class DoubleSharing(DeviceSharing):
    """See the module's docstring."""

    name = "double"

    def share(self, tensor: Tensor) -> tuple[dict[str, Any], object]:
        """See `DeviceSharing.share`."""
        shared = _Shared(tensor.nbytes)
        shared.content.copy_(tensor.reshape(-1).view(torch.uint8))
        fields = {"process": os.getpid(), "descriptor": shared.descriptor, "inode": shared.inode}
        return {**fields, "length": tensor.nbytes}, shared

    def check(self, fields: Mapping[str, Any], num_bytes: int) -> None:
        """See `DeviceSharing.check`."""
        check_fields(
            fields,
            {
                "process": integer(1),
                "descriptor": integer(),
                "inode": integer(),
                "length": integer(num_bytes, num_bytes),
            },
        )

    def open(self, fields: Mapping[str, Any]) -> Tensor:
        """See `DeviceSharing.open`."""
        descriptor = os.open(f"/proc/{fields['process']}/fd/{fields['descriptor']}", os.O_RDWR | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if (status.st_ino, status.st_size) != (fields["inode"], fields["length"]):
                raise OSError("the memory was released")
            return _map(descriptor, fields["length"])
        finally:
            os.close(descriptor)
