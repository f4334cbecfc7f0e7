"""One rank of the benchmark of replicas, started by torchrun: all methods in one process, in turns by step.

Tasks sleep, as an accelerator leaves the CPU idle. Rank 0 prints one line of JSON for each measured step.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.links.delays import Delays, delaying
from benchmarks.replicas.settings import BACKWARD_S, FORWARD_S, LIMIT, METHODS, TENSOR_BYTES, Layout, Settings
from rrfp.compute.payload import Payload
from rrfp.compute.program import Batch
from rrfp.lab.emulated import EmulatedStage, sleep_until
from rrfp.model.tasks import Kind, StepId, Task
from rrfp.model.topology import Topology
from rrfp.pipeline.api import Pipeline
from rrfp.pipeline.options import Sharing

SHARED: dict[str, Sharing] = dict(zip(METHODS, (False, "dealt", True), strict=True))

#: Steps after a rank has become slower that are not measured: by then the median of its durations is the new one.
ADAPTS = 5

#: Seconds in which all ranks hear when a step begins.
_AHEAD_S = 0.02


class Noted(EmulatedStage):
    """Notes the forwards that it runs, by virtual stage and microbatch."""

    ran: Sequence[tuple[int, int]] = ()

    def open(self, step: StepId, batch: Batch) -> None:
        super().open(step, batch)
        self.ran = []

    def forward(self, task: Task, inputs: tuple[Payload, ...]) -> Payload:
        self.ran = [*self.ran, (task.virtual_stage, task.microbatch)]
        return super().forward(task, inputs)


def begin_together() -> None:
    """Return on all ranks at one instant: they are of one host, so their clocks are one."""
    dist.barrier()
    at = torch.tensor(time.monotonic() + _AHEAD_S, dtype=torch.float64)
    dist.broadcast(at, 0)
    sleep_until(float(at))


def crossed_bytes(layout: Layout, ran: Sequence[Sequence[tuple[int, int]]]) -> int:
    """Of inputs, activations and gradients that went to another replica in a claimed step; ``ran`` is by rank."""
    count = layout.replicas
    homes = {m: m // layout.microbatches for m in range(layout.microbatches * count)}
    takers = {forward: rank % count for rank, own in enumerate(ran) for forward in own}
    num_inputs = sum(takers[0, m] != home for m, home in homes.items())
    num_outputs = sum(takers[v, m] != takers[v - 1, m] for v, m in takers if v)
    return TENSOR_BYTES * (num_inputs + 2 * num_outputs)


def run(settings: Settings, stack: ExitStack) -> None:
    """Run all methods to the end."""
    layout, factor = settings.layout, 1.0
    place = Topology.from_env(dims={"pp": layout.stages, "dp": layout.replicas})
    is_slow = place.stage == layout.slow_stage and place.replica == 0

    def seconds(task: Task) -> float:
        own = (FORWARD_S if task.kind is Kind.F else BACKWARD_S) / layout.chunks
        return settings.pace * own * (factor if is_slow else 1.0)

    slow_links: Any = delaying(Delays(settings.pace * settings.latency))
    programs = {name: Noted(layout.graph, seconds, num_bytes=TENSOR_BYTES) for name in settings.methods}
    pipes = {
        name: stack.enter_context(
            Pipeline(
                program,
                topology=place,
                chunks=layout.chunks,
                placement=layout.placement,
                limit=LIMIT,
                share_replicas=SHARED[name],
                transport=slow_links if settings.latency else "auto",
                name=name,
            ).blocking()
        )
        for name, program in programs.items()
    }
    inputs = [torch.zeros(TENSOR_BYTES, dtype=torch.uint8) for _ in range(layout.microbatches)]
    for factor in settings.factors:
        for number in range(-ADAPTS, settings.rounds):
            for name in settings.methods if number % 2 else reversed(settings.methods):
                if number < 0 and name == "plain":
                    continue  # it adapts to nothing
                begin_together()
                batch = inputs if place.stage == 0 else None
                result = pipes[name].step(batch, microbatches=layout.microbatches)
                if number < 0:
                    continue
                ran: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(ran, programs[name].ran)
                crossed = 0
                if name == "dealt":
                    crossed = TENSOR_BYTES * sum(max(0, count - layout.microbatches) for count in result.dealt)
                elif name == "claimed":
                    crossed = crossed_bytes(layout, ran)
                if place.rank == 0:
                    line = {"method": name, "factor": factor, "seconds": result.seconds, "crossed": crossed}
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
