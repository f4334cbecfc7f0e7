"""Theorem 6.1 of the paper: an upper bound on the makespan of BF with unlimited memory.

Without communication, with one chunk a stage and unsplit backward, for N stages and M microbatches:

    makespan <= F + B + sum over j = 1 .. M-1 of (Fmax(j) - Flast(j))
                      + sum over j = 0 .. M-2 of (Bmax(j) - Blast(j)).

F is the makespan of the pipeline that only runs forwards, stage 0 to stage N-1, microbatches in order 0 .. M-1; B that
of the backwards alone, stage N-1 to stage 0, in the same order. Fmax(j) is the longest forward of microbatch j on any
stage, Flast(j) its forward on stage N-1; likewise Bmax and Blast, and *last* is stage N-1 there too.

The sums leave out the microbatch whose way through all stages F or B counts in full: F is at least microbatch 0's
whole way and then Flast of all others, B at least Blast of all but microbatch M-1 and then the latter's whole way. So
the sums say how far the last stage is from being the slowest, and vanish where it is.

A stage that waits for memory is outside the theorem: with a limit below M the bound may fail. Its other side, what no
run can beat, is `rrfp.engine.bound`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rrfp.costs import CostTable
from rrfp.errors import ConfigError


def theorem_6_1(costs: CostTable) -> float:
    """Seconds that BF never exceeds while no stage waits for memory.

    The sum is taken in another order than a simulated makespan: compare with a relative tolerance of 1e-12.

    Args:
        costs: one step's costs, as the theorem has them.

    Raises:
        ConfigError: if the costs have several chunks a stage, split backward or a latency.
    """
    if costs.chunks != 1:
        raise ConfigError(f"Theorem 6.1 takes 1 chunk a stage, the costs have {costs.chunks}")
    if costs.split:
        raise ConfigError("Theorem 6.1 takes unsplit backward, the costs are split (see CostTable.to_unsplit)")
    if costs.latency_forward.any() or costs.latency_backward.any():
        raise ConfigError("Theorem 6.1 takes no communication, the costs have latencies above 0")
    forward, backward = costs.forward.tolist(), costs.backward.tolist()
    excess_forward = (costs.forward.max(axis=0) - costs.forward[-1])[1:]
    excess_backward = (costs.backward.max(axis=0) - costs.backward[-1])[:-1]
    pipelines = _makespan(forward) + _makespan(reversed(backward))
    return pipelines + float(excess_forward.sum()) + float(excess_backward.sum())


def _makespan(stages: Iterable[Sequence[float]]) -> float:
    """The end of a pipeline of one kind of task: a row a stage in the order of travel, a column a microbatch."""
    ends: list[float] = []
    for durations in stages:
        arrivals = ends or [0.0] * len(durations)
        ends, now = [], 0.0
        for arrival, duration in zip(arrivals, durations, strict=True):
            now = max(now, arrival) + duration
            ends.append(now)
    return ends[-1]
