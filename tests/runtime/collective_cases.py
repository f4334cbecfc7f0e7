"""Cases for 4 ranks: what is trained elsewhere over zmq, over `collective` here, compared with the same references."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from runtime import data_parallel_cases
from runtime.toys import TOLERANCE
from transports.gloo_backend import over_gloo

from rrfp.compute.split import backward as split_backward

OVER: dict[str, Any] = {"transport": over_gloo}
V: dict[str, Any] = {"chunks": 2, "placement": "v"}

#: One for each way to place and to split.
FOUR_STAGES: list[dict[str, Any]] = [
    {"hint": "bf", "tokens": True, "microbatches": (1, 6)},
    {**V, "hint": "bfw", "split": True, "limit": "n", "microbatches": (6,)},
]
REPLICATED: list[dict[str, Any]] = [
    {"hint": "bfw", "split": True, "tokens": True},
    {**V, "strict": "zb-v", "split": True},
]
SHARDED: list[dict[str, Any]] = [
    {"hint": "bfw", "split": True, "limit": "1f1b", "tokens": True},
    {**V, "hint": "slot-aware", "split": True},
]


def four_stages(rank: int) -> None:
    """PP 4."""
    os.environ.setdefault("TORCHELASTIC_RUN_ID", "collective")
    split_backward.MIN_FLOPS = 0.0  # or nothing of this size would be deferred
    from runtime import torchrun_gradients

    _assert_small([torchrun_gradients.difference(4, {**options, **OVER}) for options in FOUR_STAGES])


def two_stages_of_two_replicas(rank: int) -> None:
    """PP 2, DP 2."""
    split_backward.MIN_FLOPS = 0.0
    _assert_small([data_parallel_cases.gap("accumulates", {**options, **OVER}) for options in REPLICATED])


def two_stages_of_two_members(rank: int) -> None:
    """PP 2, TP 2."""
    split_backward.MIN_FLOPS = 0.0
    from runtime import torchrun_tensor_parallel

    mesh = torchrun_tensor_parallel.meshes([(2, 1, 2)])[2, 1, 2]
    _assert_small([torchrun_tensor_parallel.examine(mesh, {**options, **OVER})[0] for options in SHARDED])


def _assert_small(gaps: list[float]) -> None:
    assert [gap for gap in gaps if not gap < TOLERANCE] == []
    dist.barrier()
