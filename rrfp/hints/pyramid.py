"""Pyramids: an order of microbatches whose sizes are known beforehand, for any hint.

It only orders microbatches; the wrapped hint chooses the kind of task. Every stage that knows the sizes uses the same
order, so none waits for a microbatch that comes later. If a task must run in microbatch order (for bitwise reproducible
sums, say), the core ignores it.

A step's microbatches are cut, in the caller's order, into runs of about 4 N, and each run is sorted short, long, short:
sizes rise to the middle and fall again. Neighbours then have similar sizes. That matters in tight memory: a short
microbatch between two long ones waits behind them on every stage, and holds its slots meanwhile. A step that begins and
ends with short ones also fills and drains the pipeline fast.

Why not one pyramid? A size is one number, and stages may depend on it differently (images cost a vision stage, text a
language stage). One pyramid over a long step would put all microbatches that are large for one stage side by side, and
the other stages would idle. Over 4 N microbatches such differences average out, and neighbours are similar enough.
Where an earlier step has shown that the sizes order the times of every stage, there are no such differences, and one
pyramid over the whole step is better.

Why not always within limited bytes? A pyramid puts large microbatches side by side, and there is room for fewer of them
at once; in the caller's order small ones between large ones cost time. Which costs more depends on the sizes and the
room of every stage. `step_time` estimates both orders, and a pyramid has to save a few percent: sizes say only in part
what microbatches cost and hold on each stage. (One chunk a stage, from the second step on.)

Why none where bytes are limited and branches join? The in-order banker (`rrfp.memory.banker`) keeps room for the
microbatches of the lowest numbers first, and a pyramid starts others: the room stays empty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from rrfp.core.events import Event
from rrfp.core.hint import Hint, View
from rrfp.core.ready_set import ReadySet
from rrfp.hints.priorities import BackwardForwardWeight
from rrfp.hints.slot_aware import SlotAware
from rrfp.memory.branches import plain_stages
from rrfp.model.tasks import B, F, Kind, Task, W

#: Microbatches of one pyramid, for each stage of the pipeline.
LENGTH_PER_STAGE = 4

#: The part of a step that pyramids have to save where bytes are limited. Found by simulation: docs/hint-studies.md.
LEAST_SAVING = 0.025
#: So that what fits exactly in bytes also fits in shares of the mean.
ROUNDING = 1 + 1e-9

#: One pyramid a step where the sizes correlate with the times of every stage by more than this.
ORDERS_ALL = 0.95


class Pyramids(Hint):
    """The hint ``within`` on microbatches ordered by size: runs of short, long, short.

    Without sizes, or with equal ones, it does the same as ``within``.

    Args:
        within: chooses among ready tasks. If sizes are known, its own order of microbatches is replaced.
    """

    wants_sizes = True

    def __init__(self, within: Hint) -> None:
        self.within = within
        self.may_wait = within.may_wait
        self.wants_split = within.wants_split

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        return self.within.choose(ready, view)

    def reports_begun(self, view: View) -> bool:
        return self.within.reports_begun(view)

    def awaits(self, task: Task, view: View) -> bool:
        return self.within.awaits(task, view)

    def open_step(self, view: View) -> None:
        """Passed to the wrapped hint, which may now wait or not."""
        self.within.open_step(view)
        self.may_wait = self.within.may_wait

    def observe(self, event: Event) -> None:
        self.within.observe(event)

    def microbatch_order(self, view: View) -> Sequence[int] | None:
        sizes = view.sizes
        if sizes is None or min(sizes) == max(sizes):
            return self.within.microbatch_order(view)
        if view.most_bytes is not None and _has_joins(view):
            return self.within.microbatch_order(view)
        measured = view.size_correlation
        is_one = measured is not None and measured > ORDERS_ALL
        order = pyramids(sizes, len(sizes) if is_one else LENGTH_PER_STAGE * view.placement.stages)
        callers = self.within.microbatch_order(view)
        return order if _pays(order, callers or range(len(sizes)), sizes, view) else callers


def _pays(order: Sequence[int], callers: Sequence[int], sizes: Sequence[float], view: View) -> bool:
    """Whether bytes are not limited, or hardly, or a step in ``order`` is enough shorter by estimate."""
    if view.byte_rooms is None:
        return True
    rooms = [math.inf if (room := view.byte_rooms[stage]) is None else room * ROUNDING for stage in view.graph.stage_of]
    relative, split = _in_means(sizes), view.graph.split
    if sum(sorted(relative)[-2 * len(rooms) :]) <= min(rooms):
        return True
    ours, theirs = (step_time([relative[m] for m in each], rooms, split) for each in (order, callers))
    return ours <= (1 - LEAST_SAVING) * theirs


def _in_means(sizes: Sequence[float]) -> list[float]:
    largest = max(sizes)  # no sum of shares overflows, or is 0
    shares = [size / largest for size in sizes]
    mean = math.fsum(shares) / len(shares)
    return [share / mean for share in shares]


def _has_joins(view: View) -> bool:
    """Whether branches of the graph join, as this step visits it."""
    return len(plain_stages(view.graph, view.visits.patterns)) < view.placement.stages


def pyramids(sizes: Sequence[float], length: int) -> list[int]:
    """Every microbatch once, in runs of about ``length``: short, long, short."""
    count = len(sizes)
    runs = max(1, round(count / length))
    order: list[int] = []
    for run in range(runs):
        members = range(run * count // runs, (run + 1) * count // runs)
        rising = sorted(members, key=sizes.__getitem__)
        order += rising[0::2] + rising[1::2][::-1]
    return order


@dataclass(slots=True)
class _Stage:
    room: float
    is_split: bool
    #: The number of stages from here on.
    depth: int
    #: Forwards and backwards whose inputs are here, and split backwards that have ended.
    inputs: int = 0
    gradients: int = 0
    halves: int = 0
    #: Tasks begun, and microbatches that hold nothing any more.
    forwards: int = 0
    backwards: int = 0
    weights: int = 0
    freed: int = 0
    held: float = 0.0
    is_busy: bool = False

    def begin(self, sizes: Sequence[float]) -> tuple[Kind, int] | None:
        """The next task, if any."""
        m = self.forwards
        fits = m < self.inputs and (m == self.freed or self.held + sizes[m] <= self.room)
        is_backward_ready = self.backwards < self.gradients
        if fits and (m - self.backwards < self.depth or not is_backward_ready):
            self.forwards += 1
            self.held += sizes[m]
            kind = F
        elif is_backward_ready:
            m = self.backwards
            self.backwards += 1
            kind = B
        elif self.weights < self.halves:
            m = self.weights
            self.weights += 1
            kind = W
        else:
            return None
        self.is_busy = True
        return kind, m

    def end(self, kind: Kind, size: float) -> None:
        self.is_busy = False
        if kind is B and self.is_split:
            self.halves += 1
        elif kind is not F:
            self.held -= size
            self.freed += 1


def step_time(sizes: Sequence[float], rooms: Sequence[float], split: Sequence[bool]) -> float:
    """An estimate of how long a step takes that runs microbatches in the order given.

    A simulation of a chain of stages of one speed. A task takes as long as its microbatch is large, a whole backward
    twice that, and messages take no time. On stage s of N forwards come first while fewer than N - s microbatches are
    in flight, then backwards, then weight tasks. Every stage runs the tasks of a kind in the same order, so a few
    counters describe it: simulating a task takes 0.5 us, and 35 us in the engine.

    Args:
        sizes: of the microbatches, in their order; they hold as much.
        rooms: by stage, how much it may hold; one microbatch always fits.
        split: by stage, whether its backward is split, and a microbatch is held until its weight task has ended.
    """
    last, ends = len(rooms) - 1, list[tuple[float, int, Kind, int]]()
    stages = [_Stage(room, halved, last + 1 - s) for s, (room, halved) in enumerate(zip(rooms, split, strict=True))]
    stages[0].inputs = len(sizes)
    now, touched = 0.0, [0]
    while True:
        for number in touched:
            stage = stages[number]
            if not stage.is_busy and (task := stage.begin(sizes)) is not None:
                kind, m = task
                seconds = sizes[m] if stage.is_split or kind is F else 2 * sizes[m]
                heappush(ends, (now + seconds, number, kind, m))
        if not ends:
            return now
        now, touched = ends[0][0], []
        while ends and ends[0][0] == now:
            _, number, kind, m = heappop(ends)
            stages[number].end(kind, sizes[m])
            touched.append(number)
            if kind is F and number < last:
                stages[number + 1].inputs += 1
                touched.append(number + 1)
            elif kind is F:
                stages[number].gradients += 1
            elif kind is B and number:
                stages[number - 1].gradients += 1
                touched.append(number - 1)


def slot_aware_pyramid() -> Pyramids:
    """Slot-aware on microbatches ordered by size, if sizes are known: short, long, short."""
    return Pyramids(SlotAware())


def bfw_pyramid() -> Pyramids:
    """BFW on microbatches ordered by size, if sizes are known: short, long, short."""
    return Pyramids(BackwardForwardWeight())
