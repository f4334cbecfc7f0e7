"""What a rank holds and has moved, at any time: for a monitor beside the training loop, and for errors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rrfp.core.usage import Holding, Peaks
from rrfp.devices.base import Device
from rrfp.transports.base import TransportStatistics


@dataclass(frozen=True, slots=True)
class RankStatistics:
    """One rank, at one moment.

    The figures are read one after the other while the rank goes on: a task may complete in between.

    Attributes:
        rank: which rank.
        stage: its stage.
        now: what it holds; nothing between two steps.
        last_step: the most that it held in the step that runs, so far, or else in the last one.
        peaks: the most that it held in any step since the start.
        transport: what its transport has moved since the start.
        device_allocated: bytes in tensors on the rank's device, of the whole process; None on a CPU, as the next two.
        device_reserved: bytes that the allocator of the device holds.
        device_peak: the most that was in tensors on the device since the process began, or since its program reset the
            figure.
    """

    rank: int
    stage: int
    now: Holding
    last_step: Peaks
    peaks: Peaks
    transport: TransportStatistics
    device_allocated: int | None = None
    device_reserved: int | None = None
    device_peak: int | None = None


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
