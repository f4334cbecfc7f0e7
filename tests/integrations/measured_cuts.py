"""One rank that measures where to cut a chain whose first block is by far the slowest, on rank 1 its last."""

from __future__ import annotations

import json
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

import rrfp


class Slow(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def forward(self, value: Tensor) -> Tensor:
        time.sleep(self._seconds)
        return value + 0


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    seconds = [0.0, 0.0, 0.0, 0.0]
    seconds[-rank] = 0.2
    split = rrfp.split([Slow(each) for each in seconds], 2, cuts="times", sample=torch.zeros(1))
    print(json.dumps({"rank": rank, "cuts": split.cuts}), flush=True)  # noqa: T201
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
