"""Random graphs with branches and skips, on random placements: every step ends, whatever hints and networks do."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from batches import batches
from sim.adversaries import ADVERSARIES, holding_back, random_limit

from rrfp import Hint, View
from rrfp.hints.priorities import BackwardForward, ForwardPriority
from rrfp.hints.registry import create_hint
from rrfp.hints.slot_aware import SlotAware
from rrfp.lab.cluster.random_run import Delivery, RandomRun
from rrfp.lab.explore.cases import random_visits
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import TablePlacement
from rrfp.model.tasks import Kind, Mode, Task

#: Graphs of the long run, in one test, and in a quick one.
NUM_GRAPHS, BATCH, QUICK = 10_000, 100, 200


class Shuffled(BackwardForward):
    """Gives microbatches priority in any order but theirs, and takes no other than the first in it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed

    def microbatch_order(self, view: View) -> Sequence[int]:
        return random.Random(self._seed).sample(range(view.microbatches), view.microbatches)


HINTS: Sequence[Callable[[random.Random], Hint]] = (
    *ADVERSARIES,
    lambda rng: Shuffled(rng.randrange(2**32)),
    lambda rng: create_hint(rng.choice(["slot-aware", "slot-aware-pyramid", "bfw-pyramid"])),
    lambda rng: holding_back(rng.choice([BackwardForward, ForwardPriority, SlotAware])()),
    lambda rng: holding_back(Shuffled(rng.randrange(2**32))),
)


def random_graph(rng: random.Random) -> TaskGraph:
    """Up to seven virtual stages with any edges, on up to four stages, each split or not."""
    count, density, share = rng.randint(1, 7), rng.choice([0.2, 0.4, 0.7]), rng.choice([0.0, 1.0, 0.5])
    edges = tuple((u, v) for v in range(count) for u in range(v) if rng.random() < density)
    drawn = [rng.randrange(4) for _ in range(count)]
    numbers = {stage: number for number, stage in enumerate(dict.fromkeys(drawn))}
    split = tuple(rng.random() < share for _ in range(count))
    return TaskGraph(TablePlacement(tuple(numbers[stage] for stage in drawn)), edges, split)


def run_graph(seed: int) -> None:
    """Make the graph of this seed and run it to its end."""
    rng = random.Random(seed)
    graph = random_graph(rng)
    stages, count = graph.placement.stages, graph.placement.num_virtual_stages
    steps = [
        (rng.choice([Mode.TRAIN, Mode.TRAIN, Mode.FORWARD]), rng.randint(1, 6)) for _ in range(rng.choice([1, 1, 2]))
    ]
    share = rng.choice([0.0, 0.0, 0.3, 0.7])
    if (
        share
    ):  # no rank waits for the others at the end of a step here, and it may skip all that it has in common with them
        steps = steps[:1]
    forced = [(rng.choice([*Kind]), v) for v in range(count) if rng.random() < 0.7] if rng.random() < 0.3 else []
    microbatches = max(number for _, number in steps)
    sizes = {Task(kind, m, v): rng.randint(1, 10) for kind in Kind for m in range(microbatches) for v in range(count)}
    adversary, deliveries = rng.choice(HINTS), list[Delivery](["any", "any", "oldest", "newest"])
    members = rng.choice([1, 1, 1, 2])
    RandomRun(
        graph,
        [adversary(rng) for _ in range(stages)],
        [random_limit(rng, microbatches) for _ in range(stages)],
        seed=seed,
        depth=rng.choice([1, 1, 2]),
        in_order=forced,
        num_bytes=lambda task: sizes.get(task, 1),
        delivery=rng.choice(deliveries),
        members=members,
        takes_offers=members == 1 and rng.random() < 0.5,
        visits=[random_visits(count, number, rng, share) for _, number in steps],
    ).run(steps)


@pytest.mark.parametrize("first", batches(NUM_GRAPHS, BATCH, QUICK))
def test_every_random_graph_ends_with_each_task_run_once(first: int) -> None:
    for seed in range(first, first + BATCH):
        try:
            run_graph(seed)
        except Exception as error:
            raise AssertionError(f"run_graph({seed}) failed: {type(error).__name__}: {error}") from error
