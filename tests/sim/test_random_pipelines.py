"""Ten thousand random small pipelines on the real cores: whatever the hints, the delays and the limits, every run ends.

`RandomRun` checks on the way that each task runs once and after its inputs, that D keeps its limit, and that every
stage finishes every step once. A failure names its seed: `PYTHONPATH=tests/sim python -c "import test_random_pipelines
as t; t.run_pipeline(SEED)"` replays it alone.
"""

from __future__ import annotations

import random

import pytest
from batches import batches
from sim.adversaries import ADVERSARIES, random_limit

from rrfp.lab.cluster.random_run import Delivery, RandomRun
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import Placement
from rrfp.model.tasks import Kind, Mode, Task

NUM_PIPELINES, QUICK = 10_000, 500
BATCH = 500


def random_graph(rng: random.Random) -> TaskGraph:
    """A chain, sometimes with a skip edge, each virtual stage split or not."""
    placement = Placement(rng.randint(1, 5), rng.choice([1, 1, 2]), rng.choice(["looped", "v"]))
    count = placement.num_virtual_stages
    edges = {(v, v + 1) for v in range(count - 1)}
    if count > 2 and rng.random() < 0.2:
        u = rng.randrange(count - 2)
        edges.add((u, rng.randrange(u + 2, count)))
    share = rng.choice([0.0, 1.0, 0.5])
    return TaskGraph(placement, tuple(sorted(edges)), tuple(rng.random() < share for _ in range(count)))


def run_pipeline(seed: int) -> None:
    """Make the pipeline of this seed and run it to its end."""
    rng = random.Random(seed)
    graph = random_graph(rng)
    stages, count = graph.placement.stages, graph.placement.num_virtual_stages
    microbatches = rng.randint(1, 6)
    steps = [(rng.choice([Mode.TRAIN, Mode.TRAIN, Mode.FORWARD]), microbatches)]
    if rng.random() < 0.2:
        steps.append((rng.choice([*Mode]), rng.randint(1, 3)))
    adversary = rng.choice(ADVERSARIES)
    forced: list[tuple[Kind, int]] = []
    if rng.random() < 0.3:
        forced = [(rng.choice([*Kind]), v) for v in range(count) if rng.random() < 0.7]
    sizes = {Task(kind, m, v): rng.randint(1, 10) for kind in Kind for m in range(microbatches) for v in range(count)}
    deliveries: list[Delivery] = ["any", "any", "oldest", "newest"]
    network = RandomRun(
        graph,
        [adversary(rng) for _ in range(stages)],
        [random_limit(rng, microbatches) for _ in range(stages)],
        seed=seed,
        depth=rng.choice([1, 1, 2]),
        in_order=forced,
        num_bytes=lambda task: sizes.get(task, 1),
        delivery=rng.choice(deliveries),
        takes_offers=rng.random() < 0.5,
    )
    network.run(steps)


@pytest.mark.parametrize("first", batches(NUM_PIPELINES, BATCH, QUICK))
def test_every_random_pipeline_ends_with_each_task_run_once(first: int) -> None:
    for seed in range(first, first + BATCH):
        try:
            run_pipeline(seed)
        except Exception as error:
            raise AssertionError(f"run_pipeline({seed}) failed: {type(error).__name__}: {error}") from error
