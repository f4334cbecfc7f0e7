"""A double whose memory is apart from the CPU's, and tensors in it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from rrfp.devices.base import Device
from rrfp.lab.device_double import DoubleDevice

#: A reference to a storage that does not keep it alive; torch has no types for it.
WeakStorage: Any = StorageWeakRef


class SeparateDouble(DoubleDevice):
    """A double that holds only the tensors that `empty` made, so that others are the CPU's."""

    def __init__(self, seconds: float | Callable[[int], float] = 0.001) -> None:
        super().__init__(seconds)
        self._made: dict[int, Any] = {}

    def empty(self, tensor: Tensor) -> Tensor:
        made = super().empty(tensor)
        storage = made.untyped_storage()
        self._made[storage._cdata] = WeakStorage(storage)
        return made

    def holds(self, tensor: Tensor) -> bool:
        if tensor.layout is not torch.strided:
            return False
        reference = self._made.get(tensor.untyped_storage()._cdata)
        return reference is not None and not bool(reference.expired())


class CountingDouble(SeparateDouble):
    """Counts the bytes of host memory for copies that are in use, and the most of them."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self._staged: list[tuple[Any, int]] = []
        self.peak = 0

    def empty_on_host(self, tensor: Tensor) -> Tensor:
        made = super().empty_on_host(tensor)
        self._staged = [(ref, size) for ref, size in self._staged if not ref.expired()]
        self._staged.append((WeakStorage(made.untyped_storage()), made.numel() * made.itemsize))
        self.peak = max(self.peak, sum(size for _, size in self._staged))
        return made


def put(device: Device, tensor: Tensor) -> Tensor:
    """``tensor`` in the device's memory, complete, with the same strides, conjugation and requires_grad."""
    if tensor.layout is not torch.strided:
        return tensor
    source = tensor.detach()
    flat = torch.empty(0, dtype=torch.uint8).set_(source.untyped_storage())
    memory = device.empty(flat)
    memory.copy_(flat)
    made = torch.empty(0, dtype=tensor.dtype, device=memory.device).set_(
        memory.untyped_storage(), source.storage_offset(), source.size(), source.stride()
    )
    made = made.conj() if source.is_conj() else made
    made = torch._neg_view(made) if source.is_neg() else made
    return made.requires_grad_(tensor.requires_grad)


def scribble(tensor: Tensor) -> None:
    """Overwrite all memory behind a tensor."""
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    memory.fill_(0xFF)


@asynccontextmanager
async def closing(devices: Sequence[Device | None]) -> AsyncIterator[None]:
    """End the doubles among ``devices`` at the end of the block."""
    try:
        yield
    finally:
        for device in devices:
            if isinstance(device, DoubleDevice):
                await asyncio.to_thread(device.close)


def check_races(devices: Sequence[Device | None], *, may_write: bool = False) -> None:
    """No double has seen a race, unless the source of a cancelled copy ``may`` be overwritten."""
    for device in devices:
        if isinstance(device, DoubleDevice):
            assert [line for line in device.problems if not may_write or "were written to before" not in line] == []
