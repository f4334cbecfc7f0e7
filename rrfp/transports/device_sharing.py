"""Tensors that one process copies out of the memory of another one's device: an option of `DeviceCopies`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from rrfp.transports.device_copies import DeviceCopies
from rrfp.transports.header_checks import TensorSpec


@runtime_checkable
class SharesDeviceMemory(DeviceCopies, Protocol):
    """Copies of a device whose memory other processes of the host can open. As with `DeviceCopies`, no call blocks.

    Attributes:
        sharing: the way in which memory is shared; both ends must have the same.
    """

    sharing: str

    async def share(self, tensors: Sequence[Tensor]) -> list[tuple[dict[str, Any] | None, object]]:
        """Let other processes open the memory of tensors that the device holds; returns when they may read it.

        Args:
            tensors: complete ones. One that is not dense is copied, on the device.

        Returns:
            For each tensor plain fields, and what must be kept until the other process has pulled it. An empty tensor
            has no memory: None and None.

        Raises:
            OSError: some of the memory cannot be shared; says why.
        """

    def check_shared(self, fields: Mapping[str, Any], num_bytes: int) -> None:
        """Refuse fields that no `share` of a tensor returns. They come from the network.

        Args:
            fields: of one tensor.
            num_bytes: its bytes.

        Raises:
            FrameError: without a peer; names the field.
        """

    async def pull(self, shared: Sequence[Mapping[str, Any] | None], specs: Sequence[TensorSpec]) -> list[Tensor]:
        """Copy tensors out of another process's memory into this device's; returns when that is not read any more.

        Args:
            shared: checked fields, and None for each empty tensor.
            specs: dtype, shape and requires_grad of each.

        Returns:
            Dense leaves in memory of their own.

        Raises:
            OSError: some of the memory cannot be opened; says why.
        """
