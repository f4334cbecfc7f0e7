"""A rank of two replicas, each on a host of its own, of which one loses a rank; run by torchrun, as users write it."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from runtime.lost_ranks import STAGES, batch_of
from runtime.random_finishes import expected_step
from runtime.toys import loss_fn, stages

import rrfp
from rrfp import checkpoint

LAST = 3
VICTIM = 3


def die_in_the_last_backward(module: torch.nn.Module, microbatches: int) -> None:
    seen = []

    def die(*_: Any) -> None:
        seen.append(1)
        if len(seen) == microbatches:
            time.sleep(0.5)  # its copies have left by then
            os.kill(os.getpid(), signal.SIGKILL)

    module.register_full_backward_hook(die)


def largest_gap(place: rrfp.Topology, module: torch.nn.Module) -> float:
    """Between the parameters of a rank and those of one process."""
    modules = stages(STAGES)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in modules]
    for number in range(LAST + 1):
        expected_step(modules, place.replicas, number)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(module.parameters(), modules[place.stage].parameters(), strict=True)
    return max(float((left - right).abs().max()) for left, right in pairs)


def main(folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    place = rrfp.Topology.from_env(dims={"dp": 2, "pp": STAGES})
    module = stages(STAGES)[place.stage]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    pipeline = rrfp.Pipeline(
        module, topology=place, loss_fn=loss_fn, on_lost_rank="finish", allow_insecure=True, lock_watch=False
    )
    with pipeline as pipe:
        for number in range(LAST + 1):
            batch = batch_of(place.replica, number)
            if number == LAST and place.rank == VICTIM:
                die_in_the_last_backward(module, len(batch.inputs))
            result = pipe.step(batch.inputs, batch.targets, weights=batch.lengths)
            optimizer.step()
            optimizer.zero_grad()
        path = checkpoint.save(folder, {f"layers.{place.stage}": module}, optimizer, pipe=pipe)
    gap = largest_gap(place, module)
    line = json.dumps({"rank": place.rank, "lost": result.lost, "gap": gap, "path": str(path)})
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
    raise SystemExit(3)


if __name__ == "__main__":
    main(sys.argv[1])
