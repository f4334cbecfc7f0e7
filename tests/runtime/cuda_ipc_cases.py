"""Cases for 4 ranks, each on a double of its own: trained over `cuda_ipc`, compared with staging and the reference."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from runtime.toys import TOLERANCE, data, loss_fn, stages
from torch import Tensor

import rrfp
from rrfp.compute.split import backward as split_backward
from rrfp.devices.base import SharedMemory
from rrfp.lab.device_double import DoubleDevice, DoubleSharing

STEPS = 2


class Counting(DoubleSharing):
    """Counts what is made and what is opened."""

    def __init__(self) -> None:
        self.made = self.opened = 0

    def allocate(self, num_bytes: int) -> SharedMemory:
        self.made += 1
        return super().allocate(num_bytes)

    def open(self, fields: Any) -> SharedMemory:
        self.opened += 1
        return super().open(fields)


def gradients(rank: int, count: int, transport: str, **options: Any) -> tuple[list[Tensor], Counting]:
    """Of this rank's stage after some steps, in pipelines of ``count`` stages side by side."""
    from runtime.torchrun_gradients import place

    stage, module = rank % count, stages(count)[rank % count]
    with DoubleDevice(0.0005) as device:
        device.sharing = counting = Counting()
        options = {"topology": place(count), "device": device, "transport": transport, **options}
        with rrfp.Pipeline(module, loss_fn=loss_fn, **options).blocking() as pipe:
            for number in range(STEPS):
                batch = data(6, seed=number)
                pipe.step(
                    batch.inputs if stage == 0 else None,
                    batch.targets if stage == count - 1 else None,
                    microbatches=6,
                )
        assert device.problems == []
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None], counting


def staging_s_bits(rank: int) -> None:
    """PP 2 and PP 4."""
    os.environ.setdefault("TORCHELASTIC_RUN_ID", "cuda-ipc")
    split_backward.MIN_FLOPS = 0.0  # or nothing of this size would be deferred
    options = {"hint": "bfw", "split": True, "deterministic": True}
    for count in (2, 4):
        stage = rank % count
        staged, none = gradients(rank, count, "shm", **options)
        assert none.made == none.opened == 0
        for transport in ("cuda_ipc", "auto"):
            shared, counting = gradients(rank, count, transport, **options)
            neighbours = len({stage - 1, stage + 1} & {*range(count)})
            assert counting.made == counting.opened == neighbours  # at the start, and none in a step
            assert shared
            assert all(bits_equal(*pair) for pair in zip(shared, staged, strict=True))
    dist.barrier()


def bits_equal(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors are equal in every bit."""
    return left.numpy().tobytes() == right.numpy().tobytes()


def the_reference_s_gradients(rank: int) -> None:
    """PP 2 and PP 4."""
    os.environ.setdefault("TORCHELASTIC_RUN_ID", "cuda-ipc")
    split_backward.MIN_FLOPS = 0.0
    from runtime import torchrun_gradients

    for count, options in (
        (4, {"hint": "bf", "tokens": True}),
        (4, {"chunks": 2, "placement": "v", "strict": "zb-v", "split": True}),
        (2, {"hint": "bfw", "split": True}),
    ):
        with DoubleDevice(0.0005) as device:
            configuration = {**options, "transport": "cuda_ipc", "device": device, "microbatches": (1, 6)}
            assert torchrun_gradients.difference(count, configuration) < TOLERANCE
        assert device.problems == []
    dist.barrier()
