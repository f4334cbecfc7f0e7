"""Host memory of others, such as a transport's, that a device copies from and into without a copy between."""

from __future__ import annotations

import os
import threading
import weakref
from functools import partial

from torch import Tensor

from rrfp.compute.devices.base import Device
from rrfp.log import get_logger

_log = get_logger(__name__)


class HostRegion:
    """Memory that is pinned when it is first used, and unpinned when nothing refers to this object any more."""

    def __init__(self, regions: HostRegions, memory: Tensor) -> None:
        self._regions = regions
        self._memory = memory
        self.start = memory.data_ptr()
        self.stop = self.start + memory.nbytes
        self._is_pinned: bool | None = None

    def pin(self) -> bool:
        """Whether the memory is pinned, after an attempt."""
        if self._is_pinned is None:
            self._is_pinned = self._regions.pin(self._memory)
            if self._is_pinned:
                # It refers to the memory, which is thus unpinned before it is freed. A process that ends needs neither.
                unpin = partial(_unpin, self._regions.device, self._memory, os.getpid())
                weakref.finalize(self, unpin).atexit = False
        return self._is_pinned


def _unpin(device: Device, memory: Tensor, process: int) -> None:
    # A forked child has copies of these objects, and no device.
    if os.getpid() == process:
        device.unpin(memory)


class HostRegions:
    """The regions of one rank. Thread-safe: transports add them on the loop, copies use them on a lane's thread."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._lock = threading.Lock()
        self._regions: weakref.WeakSet[HostRegion] = weakref.WeakSet()
        self._has_warned = False

    def pin(self, memory: Tensor) -> bool:
        """Whether the device could pin ``memory``; the first time that it cannot is logged."""
        is_pinned = self.device.pin(memory)
        if not is_pinned and not self._has_warned:
            self._has_warned = True
            name, size = self.device.name, memory.nbytes
            _log.warning("%s cannot pin %d bytes of shared memory: messages are copied once more", name, size)
        return is_pinned

    def add(self, memory: Tensor) -> HostRegion:
        """A region that exists as long as anything refers to it."""
        region = HostRegion(self, memory)
        with self._lock:
            self._regions.add(region)
        return region

    def pinned_around(self, tensor: Tensor) -> HostRegion | None:
        """The pinned region in which a contiguous ``tensor`` lies, or None. Work that uses it must keep it."""
        start = tensor.data_ptr()
        with self._lock:
            regions = list(self._regions)
        around = (region for region in regions if region.start <= start and start + tensor.nbytes <= region.stop)
        region = next(around, None)
        return region if region is not None and region.pin() else None
