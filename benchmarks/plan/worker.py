"""One rank, started by torchrun: runs one job after the other, and saves the trace of each in a folder, by its number.

Rank 0 prints a line of JSON for each measured step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.plan.layered import Model
from rrfp.lab.emulated import EmulatedStage, table_durations
from rrfp.lab.planning.layers import ModelLayout
from rrfp.model.graph import TaskGraph
from rrfp.model.topology import Topology
from rrfp.pipeline.api import Pipeline
from rrfp.pipeline.plan_file import Plan

#: Of a message.
NUM_BYTES = 1_000_000

#: Steps of each job that do not count.
WARM_UP = 2


def run(model: Model, plain: Any, steps: int, place: Topology, path: Path) -> None:
    """All steps of one job, in a pipeline of its own."""
    plan = Plan.read(plain)
    assert plan.cuts is not None
    layout = ModelLayout(plan.where, plan.cuts)
    graph = TaskGraph.chain(plan.stages, chunks=plan.chunks, layout=plan.placement, split=plan.split)

    def bytes_of(step: int) -> Any:
        table = model.costs(layout, step)
        return lambda m, v: table.held_bytes(m, v)

    program = EmulatedStage(graph, lambda task: 0.0, NUM_BYTES, held=lambda m, v: held(m, v))
    with Pipeline(program, topology=place, trace_steps=steps, plan=plain).blocking() as pipe:
        for number in range(-WARM_UP, steps):
            step = max(0, number)  # the warm-up runs the first one's table
            table, held = model.costs(layout, step, split=plan.split), bytes_of(step)
            program.durations = table_durations(table)
            result = pipe.step(microbatches=model.microbatches, sizes=table.sizes)
            if place.stage == 0 and number >= 0:
                print(json.dumps({"seconds": result.seconds}), flush=True)
        pipe.save_trace(path)


def main() -> None:
    """Entry point under torchrun."""
    model, plans, steps, folder = Model.from_json(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    place = Topology.from_env()
    for number, plain in enumerate(plans):
        run(model, plain, steps, place, Path(folder) / f"{number}.json")


if __name__ == "__main__":
    main()
