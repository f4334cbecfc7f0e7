"""Slot-aware: BFW for tight memory, in which a stage waits for a free slot more often than for an input.

It adds four rules to BFW: three for ways in which BFW wastes slots, and one against a backward at the wrong moment.
They read a few counters and no clock, so a decision costs the same at any size. W below is a weight task, D the slots
taken on the stage, N - s the forwards that 1F1B runs on stage s before its first backward; with C chunks all three are
in chunk tasks, N - s and s times C.

1. **Weight tasks that hold too many slots go first.** A microbatch keeps its slot until its W has run. BFW runs W when
   nothing else is ready, so with tight memory finished backwards fill the slots that forwards need. If the limit blocks
   forwards and more than max(s, slots - (N - s)) Ws wait, W runs first. Up to N slots stage s defers s Ws, as in ZB-H1
   (Zero Bubble, Qi et al. 2023). With ample memory hardly any W is forced.
2. **So does a weight task whose slot feeds an idle stage.** If the limit blocks forwards and the later stages have
   started all tasks that were sent to them, a freed slot is the fastest way to give them work. Their count of started
   tasks travels with gradients, so it is slightly old. The rule does not apply to several chunks: the sum over chunks
   does not show which of them is idle.

   Under a limit on bytes, in rules 1 and 2, the limit blocks forwards where the inputs of one are here and it does not
   fit, and the slots are the limit over what a microbatch held here takes on average.
3. **Forwards first until N - s microbatches are in flight, then BFW.** With fewer, later stages run dry at the next
   delay; with more, slots are taken long before they are needed. Beyond that depth BFW's alternation is better than
   backwards first when durations vary.
4. **A wait for a forward, in 1F1B's memory** (N - s slots on stage s, one chunk). A slot is free, the next forward is
   due and runs on the stage before, but is not here yet. BFW begins another backward; the forward then waits for it,
   and the stages behind run dry, since in this memory they hold no other input. So the stage idles for the forward, if
   it is expected within two such backwards, and no longer than that (`rrfp.core.step`). Strict 1F1B waits too, however
   long it takes. With more slots waiting gains nothing. Nor does it on split stages whose step has sizes that differ:
   when a forward comes is then hard to tell, and a split backward delays it little.

Rules 1 and 2 never apply to unsplit stages, or without a limit.
"""

from __future__ import annotations

import math

from rrfp.core.hint import View
from rrfp.core.ready_set import ChunkOrder, ReadySet
from rrfp.hints.run_ahead import EncoderAware
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import B, F, Task, W


class SlotAware(EncoderAware):
    """Slot-aware: BFW that runs a weight task early if its slot is needed."""

    wants_split = True

    def __init__(self, chunk_order: ChunkOrder = "deeper", *, idles: bool = True) -> None:
        super().__init__(chunk_order)
        self.idles = idles
        #: Forwards go first while fewer chunk tasks are in flight (forwards less backwards).
        self._depth = 0
        #: The smallest D at which the limit blocks forwards; None: unlimited.
        self._full: int | None = None
        #: Whether D alone says whether the limit blocks forwards: not where branches join, or microbatches skip parts.
        self._is_counted = True
        #: The fewest weight tasks that may wait on a full stage, as in ZB-H1.
        self._least_deferred = 0
        self._split_chunks: tuple[int, ...] = ()
        #: The number of stages that receive each forward's output; 0 with several chunks, which rule 2 does not cover.
        self._receivers = 0
        #: Whether rule 4 applies.
        self._is_tight = False

    def open_step(self, view: View) -> None:
        super().open_step(view)
        graph, here = view.graph, view.placement.virtual_stages(view.stage)
        chunks, distance = len(here), graph.distance_to_sink(view.stage)
        visits = view.visits
        self._depth = distance * chunks
        self._is_counted = graph.is_chain and not visits.are_partial
        self._full = view.full_at if self._is_counted else None
        self._least_deferred = (view.placement.stages - distance) * chunks
        self._split_chunks = tuple(chunk for chunk, v in enumerate(here) if graph.split[v])
        self._receivers = _receivers(graph, here[0]) if chunks == 1 and not visits.are_partial else 0
        has_one_source = chunks == 1 and len(graph.predecessors[here[0]]) <= 1
        waits_pay = not any(graph.split) or not _differ(view)
        self._is_tight = self.idles and has_one_source and waits_pay and view.slots == self._depth

    def reports_begun(self, view: View) -> bool:
        """Where rule 4 applies: the next stage uses it too."""
        return self._is_tight

    def awaits(self, task: Task, view: View) -> bool:
        """Rule 4: whether a forward would go first, were its input here."""
        started = view.num_enqueued(F)
        forwards = view.forwards_here
        if not self._is_tight or forwards <= self._depth or view.held == view.slots or started == forwards:
            return False
        return view.last_kind is B or started - view.num_enqueued(B) < self._depth

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        forward = self.first(F, ready, view)
        if forward is None:
            if self._split_chunks and self._wants_slots(ready, view) and (weight := ready.first(W)) is not None:
                return weight
        elif view.last_kind is B or view.num_enqueued(F) - view.num_enqueued(B) < self._depth:
            return forward
        return ready.first(B) or forward or self.otherwise(ready, view)

    def _wants_slots(self, ready: ReadySet, view: View) -> bool:
        """Whether a free slot is better than a backward: rules 1 and 2."""
        # After the last forward no slot is needed.
        if view.num_enqueued(F) == view.forwards_here or not self._is_full(ready, view):
            return False
        waiting = sum(view.num_enqueued(B, c) - view.num_enqueued(W, c) for c in self._split_chunks)
        if waiting > max(self._least_deferred, _slots(view) - self._depth):
            return True
        consumed = view.consumed_downstream
        return bool(self._receivers) and consumed is not None and consumed >= view.num_enqueued(F) * self._receivers

    def _is_full(self, ready: ReadySet, view: View) -> bool:
        if self._full is not None and view.held >= self._full:
            return True
        return (view.most_bytes is not None or not self._is_counted) and ready.holds_back_forwards


def _slots(view: View) -> float:
    """The chunk tasks a stage may hold; under bytes, of average size."""
    slots = math.inf if view.slots is None else view.slots
    if view.most_bytes is not None and view.held_bytes:
        slots = min(slots, view.most_bytes * view.held / view.held_bytes)
    return slots


def _differ(view: View) -> bool:
    """Whether the microbatches of the step are known to differ in size."""
    return view.sizes is not None and min(view.sizes) != max(view.sizes)


def _receivers(graph: TaskGraph, virtual_stage: int) -> int:
    """The number of other stages that read the forward of ``virtual_stage``."""
    stage_of = graph.placement.stage_of
    return len({stage_of(v) for v in graph.successors[virtual_stage]} - {stage_of(virtual_stage)})
