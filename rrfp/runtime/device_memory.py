"""What is known of a device's memory when it runs out."""

from __future__ import annotations

import torch

from rrfp.compute.devices.base import Device
from rrfp.core.usage import Holding


def explain_shortage(error: BaseException, device: Device | None, holding: Holding) -> BaseException:
    """``error``; if it says that ``device`` has no memory left, with a note on its use and on what the rank holds.

    The task is never run again: its module may have changed something already.
    """
    if device is not None and isinstance(error, torch.OutOfMemoryError):
        memory = device.memory()
        error.add_note(
            f"{device.name} has {memory.allocated:,} bytes in tensors ({memory.peak:,} at most so far) and "
            f"{memory.reserved:,} reserved; of those {holding.num_bytes:,} are counted as held by {holding.held} "
            "microbatches in work (chunk tasks) and by outputs; a smaller limit makes that less (docs/memory.md)"
        )
    return error
