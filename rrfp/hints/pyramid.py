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

Why none within few bytes? A pyramid puts large microbatches side by side, and there is room for fewer of them at once.
Where the limits on bytes have hardly room for as many microbatches of that size as 1F1B holds, the caller's order is
better, unless sizes differ so much that a small microbatch between two large ones costs more. (One chunk a stage.)

Why none where bytes are limited and branches join? The in-order banker (`rrfp.memory.banker`) keeps room for the
microbatches of the lowest numbers first, and a pyramid starts others: the room stays empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, pstdev

from rrfp.core.events import Event
from rrfp.core.hint import Hint, View
from rrfp.core.ready_set import ReadySet
from rrfp.hints.priorities import BackwardForwardWeight
from rrfp.hints.slot_aware import SlotAware
from rrfp.memory.branches import plain_stages
from rrfp.model.tasks import Task

#: Microbatches of one pyramid, for each stage of the pipeline.
LENGTH_PER_STAGE = 4

#: Where bytes are limited: no pyramids below this room (`rrfp.core.hint.View.byte_room`) and the spread of the sizes
#: (standard deviation over mean), unless the spread is large. Found by simulation: docs/hint-studies.md.
LEAST_ROOM, LARGE_SPREAD = 1.1, 0.5

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
        if view.byte_room is not None and _is_tight(view.byte_room, sizes):
            return self.within.microbatch_order(view)
        measured = view.size_correlation
        is_one = measured is not None and measured > ORDERS_ALL
        return pyramids(sizes, len(sizes) if is_one else LENGTH_PER_STAGE * view.placement.stages)


def _is_tight(room: float, sizes: Sequence[float]) -> bool:
    """Whether there is too little room for large microbatches side by side."""
    spread = pstdev(sizes) / fmean(sizes)
    return spread <= LARGE_SPREAD and room < LEAST_ROOM + spread


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


def slot_aware_pyramid() -> Pyramids:
    """Slot-aware on microbatches ordered by size, if sizes are known: short, long, short."""
    return Pyramids(SlotAware())


def bfw_pyramid() -> Pyramids:
    """BFW on microbatches ordered by size, if sizes are known: short, long, short."""
    return Pyramids(BackwardForwardWeight())
