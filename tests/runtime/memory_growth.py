"""Run as a program: how far a step's own count of bytes is from what the process grows by. Prints JSON.

Activations of 8 MiB each come from the operating system one by one (the environment fixes malloc's threshold), so the
resident size follows what is held. The first step warms up: it makes gradients, and measures what forwards keep.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn

import rrfp

WIDTH, ROWS, LAYERS, MICROBATCHES = 256, 8192, 5, 6


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Peak(threading.Thread):
    """The largest resident size while it runs."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most = resident()
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.is_set():
            self.most = max(self.most, resident())
            time.sleep(0.001)


def stage() -> nn.Module:
    return nn.Sequential(*[layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])


def main(stages: int, hint: str, limit: str) -> None:
    torch.set_num_threads(1)
    modules = [stage() for _ in range(stages)]
    inputs = [torch.randn(ROWS, WIDTH) for _ in range(MICROBATCHES)]
    targets = [torch.zeros(ROWS, WIDTH)] * MICROBATCHES
    bound = rrfp.Limit(bytes=int(limit)) if int(limit) > 1000 else int(limit)
    pipeline = rrfp.local(modules, hint=hint, split=hint == "bfw", limit=bound, loss_fn=nn.functional.mse_loss)
    with pipeline.blocking() as pipe:
        pipe.step(inputs, targets)
        before, peak = resident(), Peak()
        peak.start()
        result = pipe.step(inputs, targets)
        peak.ended.set()
        peak.join()
    told = {"grown": peak.most - before, "counted": list(result.peak_bytes), "held": list(result.peak_held)}
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
