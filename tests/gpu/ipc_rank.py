"""Run under torchrun, all ranks on one device: trains over `shm`, which stages, and over `cuda_ipc`, by slots.

Argument: the device. Prints one line of JSON a rank: whether the gradients have the same bits, how much memory was made
and opened, how often it was written and read, and the double's problems.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from gpu.models import DEMO, have_same_bits, loss_fn
from torch import Tensor, nn

import rrfp
from benchmarks.gpu.target import Target, open_target
from rrfp.compute.split import backward as split_backward
from rrfp.devices.base import DeviceSharing, SharedMemory

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
STEPS = 2


class CountingMemory(SharedMemory):
    """Counts the calls of another one."""

    def __init__(self, inner: SharedMemory, counts: Counter[str]) -> None:
        self.num_bytes, self.fields = inner.num_bytes, inner.fields
        self._inner = inner
        self._counts = counts

    def write(self, start: int, source: Tensor) -> object:
        """See `SharedMemory.write`."""
        self._counts["written"] += 1
        return self._inner.write(start, source)

    def read(self, start: int, target: Tensor) -> object:
        """See `SharedMemory.read`."""
        self._counts["read"] += 1
        return self._inner.read(start, target)

    def close(self, *, is_open_elsewhere: bool = True) -> None:
        """See `SharedMemory.close`."""
        self._inner.close(is_open_elsewhere=is_open_elsewhere)


class Counting(DeviceSharing):
    """The same."""

    def __init__(self, inner: DeviceSharing) -> None:
        self.name = inner.name
        self.counts: Counter[str] = Counter()
        self._inner = inner

    def allocate(self, num_bytes: int) -> SharedMemory:
        """See `DeviceSharing.allocate`."""
        self.counts["made"] += 1
        return CountingMemory(self._inner.allocate(num_bytes), self.counts)

    def check(self, fields: Mapping[str, Any]) -> int:
        """See `DeviceSharing.check`."""
        return self._inner.check(fields)

    def open(self, fields: Mapping[str, Any]) -> SharedMemory:
        """See `DeviceSharing.open`."""
        self.counts["opened"] += 1
        return CountingMemory(self._inner.open(fields), self.counts)


def train(target: Target, transport: str) -> nn.Module:
    """This rank's stage after some steps, in order and with deterministic kernels."""
    model = DEMO[target.name]
    module = model.build(target, WORLD)[RANK]
    options: dict[str, Any] = {"device": target.device, "deterministic": True, "transport": transport}
    with rrfp.Pipeline(module, loss_fn=loss_fn, **options).blocking() as pipe:
        for step in range(STEPS):
            inputs, targets = model.batch(target, step)
            pipe.step(
                inputs if RANK == 0 else None,
                targets if RANK == WORLD - 1 else None,
                microbatches=model.microbatches,
            )
    return module


def main(device: str) -> None:
    """Run both on this rank."""
    torch.set_num_threads(1)
    split_backward.MIN_FLOPS = 0.0  # or nothing of a test's size would be deferred
    torch.use_deterministic_algorithms(True)
    for enable in (torch.backends.cuda.enable_flash_sdp, torch.backends.cuda.enable_mem_efficient_sdp):
        enable(False)
    with open_target(device) as target:
        assert target.device.sharing is not None
        target.device.sharing = counting = Counting(target.device.sharing)
        staged = train(target, "shm")
        before = counting.counts.total()
        shared = train(target, "cuda_ipc")
        report = {
            "rank": RANK,
            "same_bits": have_same_bits([shared], [staged]),
            "staged": before,
            **counting.counts,
            "problems": target.take_problems(),
        }
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
