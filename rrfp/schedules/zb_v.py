"""ZB-V: two chunks a stage in V placement, split backward, nearly no bubble (Qi et al., Controllable Memory, 2024).

The V returns the first microbatch to stage 0, which also has the last virtual stage, so backwards start there while
forwards still run down the first arm. With F = B = W every stage then repeats six chunk tasks: F, B and W of both
chunks.

The published schedule takes M >= 2N - 1; for fewer see `rrfp.schedules.slots`.
"""

from __future__ import annotations

from rrfp.core.graph import Graph
from rrfp.core.schedule import Schedule
from rrfp.core.tasks import Kind
from rrfp.schedules.needs import Needs
from rrfp.schedules.slots import Slot, fill

NEEDS = Needs(chunks=2, layout="v", split=True)

_F0, _B0, _W0 = [(kind, 0) for kind in Kind]
_F1, _B1, _W1 = [(kind, 1) for kind in Kind]


def zb_v(graph: Graph, microbatches: int) -> Schedule:
    """Every stage holds at most 2 N chunk tasks (1F1B's worst stage: N whole ones). Any M >= 1.

    With F = B = W = 1 for each chunk task, no latency and M >= 2N - 1, the makespan is 6 M + N - 1: stage i starts at i
    and the last stage never idles, so no schedule of this placement is faster.
    """
    stages = graph.placement.stages
    room = max(microbatches, 2 * stages - 1)
    orders = tuple(fill(_slots(stage, stages, room), graph, stage, microbatches) for stage in range(stages))
    return Schedule("zb-v", orders)


def _slots(stage: int, stages: int, microbatches: int) -> list[Slot]:
    to_turn = stages - stage  # stages from here to the turn of the V, this one included
    return [
        # Until microbatch 0 returns from the turn, the first chunk fills the memory; then both chunks alternate.
        *[_F0] * (2 * to_turn - 1),
        *[_F1, _F0] * stage,
        # The second chunk's backwards have arrived down the second arm, the first chunk's not yet.
        *[_F1, _B1, _W1] * to_turn,
        # Steady: the first chunk is `to_turn - 1` + `stage` forwards ahead, so its F slots run out before the others.
        *[_F0, _B0, _W0, _F1, _B1, _W1] * (microbatches - stages),
        # Drain: tasks that other stages wait for come first.
        *[_B0, _B1] * stage,
        *[_B0, _W0] * to_turn,
        *[_W1] * stage,
        *[_W0] * stage,
    ]
