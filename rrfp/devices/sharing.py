"""Memory of a device that another process opens: an option of a device, such as CUDA's IPC.

The fields of shared memory are plain data, so that they travel in a message. Those that arrive come from the network:
`DeviceSharing.check` sees them before anything else does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from torch import Tensor

from rrfp.errors import FrameError

_MAX_INT = 2**63 - 1


class DeviceSharing(ABC):
    """Shares memory of one device with other processes of the host, and opens theirs.

    `share` and `open` are called in a block of a stream, on the thread that issues its work.
    """

    #: Of the way; both ends must have the same.
    name: str

    @abstractmethod
    def share(self, tensor: Tensor) -> tuple[dict[str, Any], object]:
        """Let other processes open the memory of ``tensor``, which is dense, not empty, and on the device.

        Returns:
            Plain fields; and what keeps the memory as it is while anything refers to it, until the other process has
            dropped what it opened.
        """

    @abstractmethod
    def check(self, fields: Mapping[str, Any], num_bytes: int) -> None:
        """Refuse fields that no `share` of a tensor of ``num_bytes`` returns."""

    @abstractmethod
    def open(self, fields: Mapping[str, Any]) -> Tensor:
        """The bytes of a shared tensor, in the other process's memory, which the current stream may read.

        The result must be dropped in a block of the stream that has read it, when the device has done so.
        """


def check_fields(fields: Mapping[str, Any], checks: Mapping[str, Callable[[str, Any], None]]) -> None:
    """Refuse ``fields`` unless they have exactly the names of ``checks``, each of which passes; a FrameError."""
    for name, check in checks.items():
        if name not in fields:
            refuse(name, "is absent")
        check(name, fields[name])
    for name in fields:
        if name not in checks:
            refuse(f"{name!r:.40}", f"is unknown, must be one of: {', '.join(checks)}")


def integer(least: int = 0, most: int = _MAX_INT) -> Callable[[str, Any], None]:
    """A check of a whole number between two others."""

    def check(name: str, value: Any) -> None:
        if type(value) is not int or not least <= value <= most:
            refuse(name, f"is {value!r:.80}, must be a whole number from {least} to {most}")

    return check


def refuse(field: str, reason: str) -> NoReturn:
    """Raise the error for a field."""
    raise FrameError(None, field, reason)
