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
    paths, visited = _Paths.of(costs), costs.visited()
    best = 0.0
    for stage in range(costs.stages):
        here = paths.at(list(costs.virtual_stages_of(stage)), visited)
        best = max(best, _one_machine(here))
        if limits is not None:
            slots = whole(f"limits[{stage}]", limits[stage], 1) * costs.chunks_of(stage)
            best = max(best, _memory(here, slots))
    return best


@dataclass(frozen=True, slots=True)
class _Edges:
    """The edges of the step's graphs."""

    #: Of each virtual stage, the (predecessor, row) pairs.
    into: Sequence[list[tuple[int, int]]]
    #: Of each, the (successor, row) pairs.
    out_of: Sequence[list[tuple[int, int]]]
    #: Seconds from F to F along each row, with -inf for microbatches that do not have the edge.
    forward: Matrix
    #: The same from B to B.
    backward: Matrix

    @staticmethod
    def of(costs: CostTable) -> _Edges:
        into: list[list[tuple[int, int]]] = [[] for _ in range(costs.num_virtual_stages)]
        out_of: list[list[tuple[int, int]]] = [[] for _ in into]
        for row, (u, v) in enumerate(costs.edges()):
            into[v].append((u, row))
            out_of[u].append((v, row))
        used = costs.used()
        forward, backward = (np.where(used, latency, -math.inf) for latency in costs.acting_latencies())
        return _Edges(into, out_of, forward, backward)


def _heads(costs: CostTable, edges: _Edges, begin: Matrix) -> tuple[Matrix, Matrix]:
    """The longest paths to every F and B, from ``begin`` on."""
    forward, backward = begin.copy(), np.zeros_like(begin)
    for v in range(costs.num_virtual_stages):
        for u, row in edges.into[v]:
            np.maximum(forward[v], forward[u] + (costs.forward[u] + edges.forward[row]), out=forward[v])
    for v in reversed(range(costs.num_virtual_stages)):
        backward[v] = forward[v] + costs.forward[v]
        for w, row in edges.out_of[v]:
            np.maximum(backward[v], backward[w] + (costs.backward[w] + edges.backward[row]), out=backward[v])
    return forward, backward


def _residencies(costs: CostTable, edges: _Edges) -> Matrix:
    """The longest path from the start of every F to its B's end."""
    # On a chain it is the difference of their heads. In general a path that leads to B may pass by F.
    longest = np.zeros_like(costs.forward)
    for v in range(costs.num_virtual_stages):
        begin = np.full_like(costs.forward, -math.inf)
        begin[v] = 0.0
        longest[v] = _heads(costs, edges, begin)[1][v] + costs.backward[v]
    return longest


def _tails(costs: CostTable, edges: _Edges) -> tuple[Matrix, Matrix]:
    """The longest paths that follow every F and B."""
    forward, backward = np.zeros_like(costs.forward), np.zeros_like(costs.forward)
    for v in range(costs.num_virtual_stages):
        if costs.weight is not None:
            backward[v] = costs.weight[v]
        for u, row in edges.into[v]:
            np.maximum(backward[v], (edges.backward[row] + costs.backward[u]) + backward[u], out=backward[v])
    for v in reversed(range(costs.num_virtual_stages)):
        forward[v] = costs.backward[v] + backward[v]
        for w, row in edges.out_of[v]:
            np.maximum(forward[v], (edges.forward[row] + costs.forward[w]) + forward[w], out=forward[v])
    return forward, backward


@dataclass(frozen=True, slots=True)
class _Tasks:
    """The tasks of one kind: work, head and tail in seconds."""

    work: Matrix
    head: Matrix
    tail: Matrix

    def at(self, virtual_stages: list[int], visited: Bits) -> _Tasks:
        here = visited[virtual_stages]
        return _Tasks(*(times[virtual_stages][here] for times in (self.work, self.head, self.tail)))


@dataclass(frozen=True, slots=True)
class _Paths:
    """All tasks of some virtual stages."""

    forward: _Tasks
    backward: _Tasks
    weight: _Tasks | None
    #: From the start of each F to the end of its B, and to that of its W where it is split.
    residencies: tuple[Matrix, ...] = ()

    @staticmethod
    def of(costs: CostTable) -> _Paths:
        """Longest paths before and after every task of the step."""
        edges = _Edges.of(costs)
        heads, tails = _heads(costs, edges, np.zeros_like(costs.forward)), _tails(costs, edges)
        ready = heads[1] + costs.backward
        to_backward = _residencies(costs, edges) if costs.graph is not None else ready - heads[0]
        forward = _Tasks(costs.forward, heads[0], tails[0])
        backward = _Tasks(costs.backward, heads[1], tails[1])
        if costs.weight is None:
            return _Paths(forward, backward, None, (to_backward,))
        to_weight = to_backward + costs.weight if costs.graph is not None else ready + costs.weight - heads[0]
        weight = _Tasks(costs.weight, ready, np.zeros_like(ready))
        return _Paths(forward, backward, weight, (to_backward, to_weight))

    def at(self, virtual_stages: list[int], visited: Bits) -> _Paths:
        """Those of some virtual stages that microbatches visit."""
        forward, backward = (kind.at(virtual_stages, visited) for kind in (self.forward, self.backward))
        weight = None if self.weight is None else self.weight.at(virtual_stages, visited)
        here = visited[virtual_stages]
        return _Paths(forward, backward, weight, tuple(rows[virtual_stages][here] for rows in self.residencies))


def _one_machine(tasks: _Paths) -> float:
    """The makespan of one stage by Jackson's preemptive rule, heads and tails included."""
    kinds = [kind for kind in (tasks.forward, tasks.backward, tasks.weight) if kind is not None]
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


def _memory(tasks: _Paths, slots: int) -> float:
    """The bound from `slots` chunk tasks held; 0 where all fit."""
    if slots >= tasks.forward.head.size:
        return 0.0
    earliest = _sum_of_smallest(tasks.forward.head, tasks.forward.work, slots)
    bounds = []
    kinds = [last for last in (tasks.backward, tasks.weight) if last is not None]
    for last, residencies in zip(kinds, tasks.residencies, strict=True):
        bounds.append((earliest + residencies.sum() + _sum_of_smallest(last.tail, last.work, slots)) / slots)
    return float(max(bounds))


def _sum_of_smallest(times: Matrix, work: Matrix, count: int) -> float:
    """The least sum of `count` first starts (mirrored: tails) on one lane."""
    spacing = np.arange(count) * work.min()
    smallest = np.sort(times, axis=None)[:count]
    # start[i] = max(smallest[i], start[i - 1] + shortest task)
    return float((np.maximum.accumulate(smallest - spacing) + spacing).sum())
