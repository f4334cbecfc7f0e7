"""What ``on_lost_rank="finish"`` costs while no rank is lost: steps with it and without, in turn, in one job.

torchrun --standalone --nproc-per-node 4 benchmarks/replicas/finish.py [STEPS]
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

import rrfp

MICROBATCHES, ROWS, WIDTH = 16, 64, 64

#: What a forward takes besides; most of a step's time.
SECONDS = 0.004

#: Steps of each way that do not count.
WARM_UP = 5


class Layer(nn.Module):
    """One of two stages, with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(SECONDS)
        output: Tensor = self.inner(x)
        return output


def main(steps: int) -> None:
    """Print the medians, and the median of the ratios of neighbouring steps, on rank 0."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    topology = rrfp.Topology.from_env(dims={"pp": 2, "dp": 2})
    module = Layer()
    batch = [torch.randn(ROWS, WIDTH) for _ in range(MICROBATCHES)]
    seconds: dict[str, list[float]] = {"abort": [], "finish": []}
    pipelines = [
        rrfp.Pipeline(module, topology=topology, loss_fn=nn.functional.mse_loss, on_lost_rank=way, lock_watch=False)  # type: ignore[arg-type]
        for way in seconds
    ]
    with pipelines[0] as without, pipelines[1] as finishing:
        for number in range(WARM_UP + steps):
            for way, pipe in (("abort", without), ("finish", finishing)):
                module.zero_grad()
                dist.barrier()
                began = time.perf_counter()
                pipe.step(batch, batch)
                if number >= WARM_UP:
                    seconds[way].append(time.perf_counter() - began)
    if topology.rank == 0:
        for way, own in seconds.items():
            sys.stdout.write(f"{way}: {1000 * statistics.median(own):.2f} ms\n")
        ratios = [finish / abort for abort, finish in zip(seconds["abort"], seconds["finish"], strict=True)]
        sys.stdout.write(f"finish over abort, step by step: {statistics.median(ratios):.4f}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
