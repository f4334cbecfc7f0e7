"""One rank of the benchmark of slow links, started by torchrun: all methods in one process, alternating by step."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import replace

import torch
import torch.distributed as dist

from benchmarks.links.delays import DelayedSends, Delays, delaying
from benchmarks.links.settings import Settings
from benchmarks.peers.systems import step_of
from benchmarks.shared.comparison import Runtime, Turn
from benchmarks.shared.sleeping import Stages
from benchmarks.shared.turns import run_turns


def main() -> None:
    """Entry point under torchrun."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    settings, rank, delays = Settings.from_json(sys.argv[1]), dist.get_rank(), Delays()
    DelayedSends(rank, delays).install()
    with ExitStack() as stack:
        stages = Stages(rank, settings.stages, settings.num_bytes)
        steps = {}
        for name in settings.methods:
            method = settings.METHODS[name]
            if method.runtime is Runtime.RRFP:
                method = replace(method, options={**method.options, "transport": delaying(delays)})
            steps[name] = step_of(method, settings, rank, stages, stack)

        def prepare(turn: Turn) -> None:
            delays.set(*settings.delay_of(turn))

        run_turns(settings, stages, steps, prepare)
        delays.set((), 0.0)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
