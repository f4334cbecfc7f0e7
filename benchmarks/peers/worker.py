"""One rank of the comparison, started by torchrun: all systems in one process, their methods alternating by step."""

from __future__ import annotations

import sys
from contextlib import ExitStack

import torch
import torch.distributed as dist

from benchmarks.peers.own_bytes import OwnBytes
from benchmarks.peers.settings import OWN_BYTES, Settings
from benchmarks.peers.systems import steps_of
from benchmarks.shared.sleeping import Stages
from benchmarks.shared.turns import run_turns


def main() -> None:
    """Entry point under torchrun."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with ExitStack() as stack:
        settings, rank = Settings.from_json(sys.argv[1]), dist.get_rank()
        stages = Stages(rank, settings.stages, settings.num_bytes)
        own_bytes = OwnBytes(settings, rank, stages)
        stack.callback(own_bytes.close)
        steps = {**steps_of(settings, rank, stages, stack), OWN_BYTES: own_bytes.step}
        run_turns(settings, stages, steps, own_bytes.prepare)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
