"""One rank, started by torchrun: torch's or Megatron's schedules and RRFP's on the same stages, alternating by step."""

from __future__ import annotations

import sys
from contextlib import ExitStack

import torch
import torch.distributed as dist

from benchmarks.integrations.settings import Settings
from benchmarks.shared.sleeping import Stages
from benchmarks.shared.turns import run_turns


def main() -> None:
    """Entry point under torchrun."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with ExitStack() as stack:
        settings, rank = Settings.from_json(sys.argv[1]), dist.get_rank()
        stages = Stages(rank, settings.stages, settings.num_bytes)
        if settings.runs_megatron:
            from benchmarks.integrations import megatron_systems

            steps = megatron_systems.steps_of(settings, settings.methods, stages, stack)
        else:
            from benchmarks.integrations import systems

            steps = systems.steps_of(settings, settings.methods, rank, stages, stack)
        run_turns(settings, stages, steps)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
