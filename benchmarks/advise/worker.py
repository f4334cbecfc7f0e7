"""One rank, started by torchrun: runs one job after the other, and saves the trace of the first.

Rank 0 prints a line of JSON for each measured step.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from benchmarks.advise.settings import JOBS, Job, Settings
from rrfp.lab.emulated import EmulatedStage, table_durations
from rrfp.model.graph import TaskGraph
from rrfp.model.topology import Topology
from rrfp.pipeline.api import Pipeline


def run(settings: Settings, job: Job, place: Topology, path: str | None) -> None:
    """All steps of one job, in a pipeline of its own."""
    program = EmulatedStage(
        TaskGraph.chain(settings.stages, split=job.split), table_durations(settings.costs(job, 0)), settings.num_bytes
    )
    count = settings.steps // job.joins
    options: Any = job.options
    with Pipeline(program, topology=place, trace_steps=count, **options).blocking() as pipe:
        for number in range(-settings.warm_up, count):
            step = max(0, number)  # the warm-up runs the first one's table
            program.durations = table_durations(settings.costs(job, step))
            sizes = settings.sizes(job, step)
            result = pipe.step(microbatches=len(sizes), sizes=sizes)
            if place.stage == 0 and number >= 0:
                print(json.dumps({"job": job.name, "seconds": result.seconds}), flush=True)
        if path is not None:
            pipe.save_trace(path)


def main() -> None:
    """Entry point under torchrun."""
    settings, path, place = Settings.from_json(sys.argv[1]), sys.argv[2], Topology.from_env()
    for number, job in enumerate(JOBS):
        run(settings, job, place, None if number else path)


if __name__ == "__main__":
    main()
