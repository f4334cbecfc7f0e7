"""One rank of the benchmark of replicas, started by torchrun: all methods in one process, in turns by step.

Tasks sleep, as an accelerator leaves the CPU idle. Rank 0 prints one line of JSON for each measured step.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack

import torch
import torch.distributed as dist

from benchmarks.replicas.settings import BACKWARD_S, FORWARD_S, INPUT_BYTES, LIMIT, METHODS, Settings
from rrfp.lab.emulated import EmulatedStage
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Kind, Task
from rrfp.model.topology import Topology
from rrfp.pipeline.api import Pipeline
from rrfp.pipeline.options import Sharing

SHARED: tuple[Sharing, ...] = (False, "dealt", True)

#: Steps after a rank has become slower that are not measured: by then the median of its durations is the new one.
ADAPTS = 5


def run(settings: Settings, stack: ExitStack) -> None:
    """Run all methods to the end."""
    layout, factor = settings.layout, 1.0
    place = Topology.from_env(dims={"pp": layout.stages, "dp": layout.replicas})
    is_slow = place.stage == layout.slow_stage and place.replica == 0

    def seconds(task: Task) -> float:
        own = FORWARD_S if task.kind is Kind.F else BACKWARD_S
        return settings.pace * own * (factor if is_slow else 1.0)

    pipes = {
        name: stack.enter_context(
            Pipeline(
                EmulatedStage(TaskGraph.chain(layout.stages), seconds, num_bytes=1024),
                topology=place,
                limit=LIMIT,
                share_replicas=shared,
                name=name,
            ).blocking()
        )
        for name, shared in zip(METHODS, SHARED, strict=True)
    }
    inputs = [torch.zeros(INPUT_BYTES, dtype=torch.uint8) for _ in range(layout.microbatches)]
    for factor in settings.factors:
        for number in range(-ADAPTS, settings.rounds):
            for name in METHODS if number % 2 else reversed(METHODS):
                dist.barrier()
                batch = inputs if place.stage == 0 else None
                result = pipes[name].step(batch, microbatches=layout.microbatches)
                moved = sum(max(0, count - layout.microbatches) for count in (result.dealt if name == "dealt" else ()))
                if place.rank == 0 and number >= 0:
                    line = {"method": name, "factor": factor, "seconds": result.seconds, "moved": moved}
                    print(json.dumps(line), flush=True)


def main() -> None:
    """Entry point under torchrun."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with ExitStack() as stack:
        run(Settings.from_json(sys.argv[1]), stack)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
