"""Copies of tensors between a device and the host, as a transport needs them; implemented where devices are known."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor

if TYPE_CHECKING:
    from rrfp.transports.header_checks import TensorSpec


class DeviceCopies(Protocol):
    """Copies tensors into and out of the memory of one rank's device, on streams of their own.

    Each method returns when the device has made the copies, in the order of the arguments. A copy is a dense leaf with
    memory of its own, and requires grad exactly if its source does. Sources must be complete when they are passed, and
    must not be written to before the call returns; cancelled, the call drops the copies. The methods are called on one
    loop, which they never block, and raise the device's error if it fails, `TransportClosedError` once closed.

    Attributes:
        kind: the device's type, such as ``"cuda"``.
        index: the device's number among those of its type; None where numbers mean nothing.
    """

    kind: str
    index: int | None

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the device's memory.

        Args:
            tensor: any tensor.
        """

    def register(self, memory: Tensor) -> object:
        """Pin memory of a transport before the first copy from or into it, so that no other copy is needed.

        Args:
            memory: on the host; tensors lie anywhere in it.

        Returns:
            A handle. The memory stays pinned while anything refers to it, and is not freed before.
        """

    async def to_host(self, tensors: Sequence[Tensor], into: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Copy tensors of the device into pooled pinned memory, or into that of given tensors.

        Args:
            tensors: dense ones that the device holds.
            into: tensors with the same dtypes and shapes, contiguous. Cancelled, the call may still write to them.
        """

    async def to_device(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy tensors into the device's memory. Where another stream uses them, their memory must be noted there.

        Args:
            tensors: dense ones on the CPU, in any memory.
        """

    async def copy(self, tensors: Sequence[Tensor], target: DeviceCopies) -> list[Tensor]:
        """Copy tensors of the device into the memory of the same or another device, without the host's.

        Args:
            tensors: dense ones that the device holds.
            target: of the rank that will own the copies, in this process.
        """

    def close(self) -> None:
        """Make waiting and later calls raise. May be called twice; never waits."""


def held_by(copies: DeviceCopies, tensors: Sequence[Tensor | None]) -> list[int]:
    """The indices of the tensors that a device holds."""
    return [index for index, tensor in enumerate(tensors) if tensor is not None and copies.holds(tensor)]


async def with_copies(
    tensors: Sequence[Tensor | None],
    indices: Sequence[int],
    copy: Callable[[Sequence[Tensor]], Awaitable[list[Tensor]]],
) -> list[Tensor | None]:
    """``tensors`` with those at ``indices`` replaced by their copies."""
    replaced = list(tensors)
    sources = [tensor for index in indices if (tensor := tensors[index]) is not None]
    for index, made in zip(indices, await copy(sources), strict=True):
        replaced[index] = made
    return replaced


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
