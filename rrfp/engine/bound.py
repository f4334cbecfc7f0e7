"""A lower bound on the makespan of one step, for any schedule, any hint, any order.

It knows costs and memory limits, and nothing of how tasks are chosen. Every term below follows from rules that no
runtime can break: a task starts after its inputs have arrived, a stage runs one task at a time, D stays within the
limit. Write p for a duration, l for a latency, V for the number of virtual stages.

**Paths.** Microbatch m passes F(0) .. F(V-1), B(V-1) .. B(0) of a chain, each start at or after the previous end plus
the latency between them: 0 between chunks of one stage, and 0 from F(V-1) to B(V-1). In general F(v) starts after F(u)
for every edge (u, v) of its own graph, B(u) after B(v), and B(v) after F(v). When backward is split, W(v) follows B(v)
and nothing follows W. So a task cannot start before its *head* r, the longest path that leads to it, and after its end
at least its *tail* q, the longest path that follows it, must still pass. Chunks and placement only change which
latencies are 0 and which stage a task occupies.

**One machine.** Take any set J of tasks of one stage. The stage works on J for sum p in all, cannot start before the
smallest head in J, and after it ends the last of J at least the smallest tail in J follows:

    makespan >= min r + sum p + min q        over J.

The largest value over all J is the makespan of Jackson's preemptive rule (at any time run the available task of the
longest tail), which is how it is computed. J = one task gives the longest path of its microbatch.

**Memory.** D of a stage rises at the start of each F and falls at the end of the same chunk task's last part (B, or W
when split), and D <= K * C. So n = M * C chunk tasks share k = K * C slots, each held from its F's start to its
release for at least its *residency*, the longest path between the two. Where k < n we may assume that every slot is
used (from a slot used twice one task moves to the empty one). Each slot is then idle before its first F start, held for
the residencies of its tasks, and idle after its last release; summed over the slots,

    k * makespan >= (k smallest starts of an F) + sum of residencies + (k smallest times left after a release).

Starts are bounded by heads, and by the lane: Fs of one stage do not overlap, so the next start is at least the
shortest F later. The times left after a release mirror them: bounded by tails, and spaced by the shortest releasing
task. (With all k starts replaced by the smallest head, and the times left by the smallest tail, this is the plainer
head + residency / limit + tail.) When split, a task also holds its slot from F's start to B's end at least, and the
tails after B are long where those after W are 0: the same inequality with B as the release is valid too, and the larger
one counts.

A strict schedule that never holds more than K * C chunk tasks is a run under that limit: its own peak gives its bound.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rrfp.costs import CostTable
from rrfp.costs.table import Bits, Matrix
from rrfp.errors import ConfigError
from rrfp.model.tasks import SENT_TO, F, Kind, Side, Task
from rrfp.plain import whole


def lower_bound(costs: CostTable, limits: Sequence[int] | None) -> float:
    """Seconds that no run of these costs can beat.

    It is a sum of the same numbers as a simulated makespan, in another order: compare with a relative tolerance of
    1e-12, or of a few times 1e-16 a number where the table has thousands.

    Args:
        costs: one step's costs.
        limits: for each stage the most microbatches it may hold, K >= 1, so that D is at most K times its chunks; None:
            no limit.

    Raises:
        ConfigError: `limits` has not one entry a stage, or an entry is no whole number >= 1.
    """
    if limits is not None and len(limits) != costs.stages:
        raise ConfigError(f"limits has {len(limits)} entries, must have {costs.stages} (one a stage)")
    tasks, visited = _tasks(costs), costs.visited()
    best = 0.0
    for stage in range(costs.stages):
        forward, *others = (kind.at(list(costs.virtual_stages_of(stage)), visited) for kind in tasks.values())
        best = max(best, _one_machine([forward, *others]))
        if limits is not None:
            slots = whole(f"limits[{stage}]", limits[stage], 1) * costs.chunks_of(stage)
            best = max(best, _memory(forward, others, slots))
    return best


#: The tasks of one kind on a virtual stage, one a microbatch.
_Row = tuple[Kind, int]


class _Links:
    """What follows what in the step's graphs."""

    def __init__(self, costs: CostTable) -> None:
        upward = range(costs.num_virtual_stages)
        used = costs.used()
        # -inf for microbatches that do not have the edge.
        forward, backward = (np.where(used, latency, -math.inf) for latency in costs.acting_latencies())
        rows = {edge: row for row, edge in enumerate(costs.edges())}
        graph = costs.to_graph()
        #: Every row after all that it reads.
        self.order: list[_Row] = [
            (kind, v)
            for kind in costs.durations
            for v in (reversed(upward) if SENT_TO.get(kind) is Side.BEFORE else upward)
        ]
        #: What each row reads, and what reads it, with the seconds in between.
        self.reads: dict[_Row, list[tuple[_Row, Matrix | float]]] = {row: [] for row in self.order}
        self.readers: dict[_Row, list[tuple[_Row, Matrix | float]]] = {row: [] for row in self.order}
        for kind, v in self.order:
            for producer, _, u in graph.inputs(Task(kind, 0, v)):
                seconds = 0.0 if u == v else forward[rows[u, v]] if u < v else backward[rows[v, u]]
                self.reads[kind, v].append(((producer, u), seconds))
                self.readers[producer, u].append(((kind, v), seconds))


def _heads(costs: CostTable, links: _Links, begin: Matrix) -> dict[Kind, Matrix]:
    """The longest paths to every task, from ``begin`` on."""
    heads = {kind: begin.copy() if kind is F else np.full_like(begin, -math.inf) for kind in costs.durations}
    for kind, v in links.order:
        for (producer, u), seconds in links.reads[kind, v]:
            end = heads[producer][u] + (costs.durations[producer][u] + seconds)
            np.maximum(heads[kind][v], end, out=heads[kind][v])
    return heads


def _tails(costs: CostTable, links: _Links) -> dict[Kind, Matrix]:
    """The longest paths that follow every task."""
    tails = {kind: np.zeros_like(times) for kind, times in costs.durations.items()}
    for kind, v in reversed(links.order):
        for (reader, w), seconds in links.readers[kind, v]:
            path = (seconds + costs.durations[reader][w]) + tails[reader][w]
            np.maximum(tails[kind][v], path, out=tails[kind][v])
    return tails


def _residencies(costs: CostTable, links: _Links, heads: dict[Kind, Matrix]) -> dict[Kind, Matrix]:
    """By kind, the longest path from the start of a forward to the end of that task of its own."""
    durations = {kind: times for kind, times in costs.durations.items() if kind is not F}
    if costs.graph is None:  # on a chain it is the difference of their heads
        return {kind: heads[kind] + times - heads[F] for kind, times in durations.items()}
    longest: dict[Kind, Matrix] = {kind: np.zeros_like(times) for kind, times in durations.items()}
    for v in range(costs.num_virtual_stages):  # in general a path that leads to B may pass by F
        begin = np.full_like(costs.forward, -math.inf)
        begin[v] = 0.0
        here = _heads(costs, links, begin)
        for kind, times in durations.items():
            longest[kind][v] = here[kind][v] + times[v]
    return longest


@dataclass(frozen=True, slots=True)
class _Tasks:
    """The tasks of one kind: work, head and tail in seconds."""

    work: Matrix
    head: Matrix
    tail: Matrix
    #: From the start of the forward to the end; None of forwards.
    residency: Matrix | None = None

    def at(self, virtual_stages: list[int], visited: Bits) -> _Tasks:
        here = visited[virtual_stages]
        times = (self.work, self.head, self.tail, self.residency)
        return _Tasks(*(None if each is None else each[virtual_stages][here] for each in times))  # type: ignore[arg-type]


def _tasks(costs: CostTable) -> dict[Kind, _Tasks]:
    """All tasks of the step, with the longest paths before and after each."""
    links = _Links(costs)
    heads, tails = _heads(costs, links, np.zeros_like(costs.forward)), _tails(costs, links)
    residencies = _residencies(costs, links, heads)
    return {
        kind: _Tasks(times, heads[kind], tails[kind], residencies.get(kind)) for kind, times in costs.durations.items()
    }


def _one_machine(kinds: Sequence[_Tasks]) -> float:
    """The makespan of one stage by Jackson's preemptive rule, heads and tails included."""
    heads = np.concatenate([kind.head.ravel() for kind in kinds])
    if not heads.size:  # every microbatch skips the stage
        return 0.0
    order = np.argsort(heads, kind="stable")
    work = np.concatenate([kind.work.ravel() for kind in kinds])[order].tolist()
    tails = np.concatenate([kind.tail.ravel() for kind in kinds])[order].tolist()
    arrivals = heads[order].tolist()
    waiting: list[tuple[float, float]] = []  # (-tail, work left) of what is available: the longest tail on top
    now = makespan = 0.0
    for arrival, duration, tail, until in zip(
        arrivals, work, tails, itertools.chain(arrivals[1:], [math.inf]), strict=True
    ):
        now = max(now, arrival)
        heapq.heappush(waiting, (-tail, duration))
        while waiting and now < until:
            minus_tail, left = waiting[0]
            if now + left > until:
                heapq.heapreplace(waiting, (minus_tail, left - (until - now)))
                now = until
            else:
                heapq.heappop(waiting)
                now += left
                makespan = max(makespan, now - minus_tail)
    return makespan


def _memory(forward: _Tasks, others: Sequence[_Tasks], slots: int) -> float:
    """The bound from `slots` chunk tasks held; 0 where all fit."""
    if slots >= forward.head.size:
        return 0.0
    earliest = _sum_of_smallest(forward.head, forward.work, slots)
    bounds = []
    for last in others:
        assert last.residency is not None
        bounds.append((earliest + last.residency.sum() + _sum_of_smallest(last.tail, last.work, slots)) / slots)
    return float(max(bounds))


def _sum_of_smallest(times: Matrix, work: Matrix, count: int) -> float:
    """The least sum of `count` first starts (mirrored: tails) on one lane."""
    spacing = np.arange(count) * work.min()
    smallest = np.sort(times, axis=None)[:count]
    # start[i] = max(smallest[i], start[i - 1] + shortest task)
    return float((np.maximum.accumulate(smallest - spacing) + spacing).sum())
