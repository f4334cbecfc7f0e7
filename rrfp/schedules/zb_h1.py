"""ZB-H1: 1F1B with split backward, weight tasks deferred into the bubbles (Qi et al., Zero Bubble, 2023).

F and B run in 1F1B's order; the weight task of microbatch m waits until B of m + i has run on stage i. So each stage
holds N microbatches, as many as 1F1B's first stage, and later stages have more weight tasks left for the end, when 1F1B
idles.

Why not N - i on stage i, 1F1B's own memory? If a microbatch counts until its W, the last stage may hold one, and would
run F, B, W of each before the next F: that is 1F1B. The paper, too, compares the peaks of the worst stage. If it counts
until its B, stage i holds N - i at most.
"""

from __future__ import annotations

from rrfp.core.graph import Graph
from rrfp.core.schedule import Schedule
from rrfp.core.tasks import Kind
from rrfp.schedules.needs import Needs
from rrfp.schedules.slots import Slot, fill

NEEDS = Needs(chunks=1, split=True)


def zb_h1(graph: Graph, microbatches: int) -> Schedule:
    """Every stage holds at most min(M, N) microbatches; n_F - n_B is at most N - i. One chunk a stage, any M >= 1.

    With equal stages, no latency and M >= N the lanes idle (N - 1) max(F, B, F + B - W) in all: the paper's
    (N - 1) (F + B - W) where W is no longer than F and B, a third of 1F1B's bubble where all three are equal.
    """
    stages = graph.placement.stages
    room = max(microbatches, stages)
    orders = tuple(fill(_slots(stage, stages, room), graph, stage, microbatches) for stage in range(stages))
    return Schedule("zb-h1", orders)


def _slots(stage: int, stages: int, microbatches: int) -> list[Slot]:
    forward, backward, weight = (Kind.F, 0), (Kind.B, 0), (Kind.W, 0)
    after = stages - 1 - stage
    return [
        *[forward] * after,
        *[forward, backward] * stage,
        *[forward, backward, weight] * (microbatches - after - stage),
        *[backward, weight] * after,
        *[weight] * stage,
    ]
