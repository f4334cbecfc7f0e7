"""Run under torchrun by step.py: a stage in each of two processes on one device, pulled and staged steps in turns.

Arguments: the device and the size of the work. Prints one line of JSON a rank: the seconds of its steps by transport.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import ExitStack

import torch

import rrfp
from benchmarks.gpu.step import WAYS, WORKS, batch_of, modules_of
from benchmarks.gpu.target import open_target
from rrfp.lab.demo.model import loss_fn

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def main(device: str, size: str) -> None:
    """Measure on this rank."""
    torch.set_num_threads(1)
    work = WORKS[size]
    with open_target(device) as target, ExitStack() as stack:
        module = modules_of(target, work, WORLD)[RANK]
        inputs, targets = batch_of(target, work)
        pipes = {
            way: stack.enter_context(
                rrfp.Pipeline(module, loss_fn=loss_fn, transport=way, device=target.device).blocking()
            )
            for way in WAYS
        }
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for index in range(work.steps + 2):
            for way, pipe in pipes.items():
                module.zero_grad()
                target.synchronize()
                began = time.perf_counter()
                pipe.step(
                    inputs if RANK == 0 else None, targets if RANK == WORLD - 1 else None, microbatches=len(inputs)
                )
                if index >= 2:  # the first warm up
                    seconds[way].append(time.perf_counter() - began)
    sys.stdout.write(json.dumps(seconds) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
