"""Copies of a device whose memory other processes can open: also from theirs, without the host's memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rrfp.compute.devices.base import Device
from rrfp.compute.devices.copies import StreamCopies, dense
from rrfp.compute.devices.sharing import DeviceSharing

#: Dtype, shape and requires_grad of a tensor.
_Spec = tuple[torch.dtype, tuple[int, ...], bool]

#: The fields of a shared tensor, and what keeps its memory; None and None of an empty one.
_Shared = tuple[dict[str, Any] | None, object]


def copies_of(device: Device, name: str = "rrfp-copies") -> StreamCopies:
    """The copies of a rank's transport on ``device``; with those between processes, if it offers them.

    Args:
        device: the rank's.
        name: of the threads.
    """
    if device.sharing is None:
        return StreamCopies(device, name)
    return SharingCopies(device, device.sharing, name)


class SharingCopies(StreamCopies):
    """See :class:`rrfp.transports.SharesDeviceMemory`, whose methods it has.

    Args:
        device: the rank's.
        sharing: of its memory.
        name: of the threads.
    """

    def __init__(self, device: Device, sharing: DeviceSharing, name: str = "rrfp-copies") -> None:
        super().__init__(device, name)
        self.sharing = sharing.name
        self._sharing = sharing

    async def share(self, tensors: Sequence[Tensor]) -> list[_Shared]:
        """Fields for other processes, and what keeps the memory; a tensor that is not dense is copied first."""
        shared: list[_Shared] = await self._run("send", partial(_shared, self._sharing, tensors))
        return shared

    def check_shared(self, fields: Mapping[str, Any], num_bytes: int) -> None:
        """Refuse fields of no shared tensor of ``num_bytes``: a FrameError without a peer."""
        self._sharing.check(fields, num_bytes)

    async def pull(self, shared: Sequence[Mapping[str, Any] | None], specs: Sequence[_Spec]) -> list[Tensor]:
        """Copies on the device of what other processes share."""
        pulled: list[Tensor] = await self._run("receive", partial(_pulled, self._device, self._sharing, shared, specs))
        return pulled


def _shared(sharing: DeviceSharing, tensors: Sequence[Tensor]) -> tuple[list[_Shared], object]:
    return [sharing.share(dense(tensor)) if tensor.numel() else (None, None) for tensor in tensors], tensors


def _pulled(
    device: Device, sharing: DeviceSharing, shared: Sequence[Mapping[str, Any] | None], specs: Sequence[_Spec]
) -> tuple[list[Tensor], object]:
    """Copies of other processes' memory, which is dropped here: dropping it waits for the current stream, this one."""
    opened: list[Tensor] = []
    copies: list[Tensor] = []
    try:
        for fields, (dtype, shape, _) in zip(shared, specs, strict=True):
            copies.append(device.empty(torch.empty(shape, dtype=dtype, device="meta")))
            if fields is not None:
                opened.append(sharing.open(fields))
                copies[-1].reshape(-1).view(torch.uint8).copy_(opened[-1], non_blocking=True)
    finally:
        try:
            end = device.current_stream().record()
            end.synchronize()
            end.release()
        finally:
            opened.clear()
    return [copy.requires_grad_(spec[2]) for copy, spec in zip(copies, specs, strict=True)], None
