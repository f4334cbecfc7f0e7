"""How long each message travels: an output goes once to each stage that reads it, over all edges that lead there."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from rrfp.core.tasks import Kind
from rrfp.costs.streams import Matrix
from rrfp.costs.table import CostTable

#: Of each virtual stage: the stage that its output goes to -> seconds by microbatch. Arrays of Python: a number of one
#: of numpy costs more to read than an operation on a heap.
MessageTimes = dict[Kind, Sequence[dict[int, "array[float]"]]]


def message_times(costs: CostTable) -> MessageTimes:
    """The seconds of every message of a step, by kind, sending virtual stage, receiving stage and microbatch.

    Args:
        costs: of the step. Where several edges lead from a virtual stage to one other stage, the longest time counts.
    """
    nodes = range(costs.num_virtual_stages)
    times: dict[Kind, list[dict[int, Matrix]]] = {kind: [{} for _ in nodes] for kind in (Kind.F, Kind.B)}
    for (u, v), forward, backward in zip(costs.edges(), costs.latency_forward, costs.latency_backward, strict=True):
        here, there = costs.stage_of(u), costs.stage_of(v)
        if here != there:
            for rows, peer, row in ((times[Kind.F][u], there, forward), (times[Kind.B][v], here, backward)):
                rows[peer] = np.maximum(rows[peer], row) if peer in rows else row
    return {
        kind: [{peer: array("d", row.tobytes()) for peer, row in rows.items()} for rows in of_kind]
        for kind, of_kind in times.items()
    }
