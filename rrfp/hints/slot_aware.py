"""Slot-aware: BFW for tight memory, where what holds a stage back is a free slot more often than an input.

Three rules on top of BFW, each for a way in which BFW wastes slots. They read a few counters and no clock, so a
decision costs the same at any size. W below is a weight task, D what the stage holds, N - s the forwards that 1F1B runs
on stage s before its first backward; with C chunks all three are in chunk tasks, N - s and s times C.

1. **Weight tasks that hold too many slots go first.** A microbatch keeps its slot until its W has run. BFW runs W when
   nothing else is ready, so with tight memory finished backwards fill the slots that forwards need. When the limit
   holds forwards back and more than max(s, slots - (N - s)) Ws wait, W runs first. Up to N slots stage s puts off s Ws,
   as in ZB-H1 (Zero Bubble, Qi et al. 2023). Where memory is ample hardly any W is forced.
2. **So does a weight task whose slot feeds a starving stage.** When the limit holds forwards back and the stages behind
   have started all that was sent to them, a freed slot is the fastest way to give them work. What they have started is
   a counter that travels with gradients, hence a little old. Not with several chunks: the sum over chunks does not tell
   which one starves.
3. **Forwards first until N - s microbatches are on their way, then BFW.** Fewer, and the stages behind run dry at the
   next delay; more, and slots are taken long before they are of use.
   BFW's alternation beyond that depth is better than backwards first when durations vary.

On unsplit stages and without a limit rules 1 and 2 never apply.
"""

from __future__ import annotations

from rrfp.core.graph import Graph
from rrfp.core.hint import Hint, View
from rrfp.core.ready_set import ChunkOrder, ReadySet
from rrfp.core.tasks import B, F, Task, W


class SlotAware(Hint):
    """Slot-aware: BFW that runs a weight task early where the slot it holds is needed.

    The module's docstring says when.

    Args:
        chunk_order: which chunk's forwards come first.
    """

    wants_split = True

    def __init__(self, chunk_order: ChunkOrder = "deeper") -> None:
        self.chunk_order: ChunkOrder = chunk_order
        #: Chunk tasks on their way, forwards less backwards, up to which forwards go first.
        self._depth = 0
        #: D from which the limit holds forwards back; None: unlimited.
        self._full: int | None = None
        #: Weight tasks that may wait on a full stage.
        self._patience = 0
        #: Forwards of the step: once all have run, a slot is worth nothing.
        self._forwards = 0
        self._split_chunks: tuple[int, ...] = ()
        #: Stages that each forward's output goes to; 0 with several chunks, where rule 2 does not apply.
        self._receivers = 0

    def open_step(self, view: View) -> None:
        """Work the thresholds of this stage out."""
        stages, chunks = view.placement.stages, view.placement.chunks
        here = view.placement.virtual_stages(view.stage)
        self._depth = (stages - view.stage) * chunks
        self._forwards = view.microbatches * chunks
        if view.slots is None:
            self._full = None
        else:
            # Under the staircase rule the last C - 1 slots are kept for deeper chunks.
            self._full = view.slots - (chunks - 1)
            self._patience = max(view.stage * chunks, view.slots - self._depth)
        self._split_chunks = tuple(chunk for chunk, v in enumerate(here) if view.graph.split[v])
        self._receivers = _receivers(view.graph, here[0]) if chunks == 1 else 0

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        """See `rrfp.core.hint.Hint.choose`."""
        forward = ready.first(F, self.chunk_order)
        if forward is None:
            if self._wants_slots(view) and (weight := ready.first(W)) is not None:
                return weight
        elif view.last_kind is B or view.num_enqueued(F) - view.num_enqueued(B) < self._depth:
            return forward
        return ready.first(B) or forward or ready.first(W)

    def _wants_slots(self, view: View) -> bool:
        """Whether a slot is worth more than a backward: rules 1 and 2."""
        if self._full is None or view.held < self._full or view.num_enqueued(F) == self._forwards:
            return False
        waiting = sum(view.num_enqueued(B, c) - view.num_enqueued(W, c) for c in self._split_chunks)
        if waiting > self._patience:
            return True
        consumed = view.consumed_downstream
        return bool(self._receivers) and consumed is not None and consumed >= view.num_enqueued(F) * self._receivers


def _receivers(graph: Graph, virtual_stage: int) -> int:
    """How many other stages read the forward of ``virtual_stage``."""
    stage_of = graph.placement.stage_of
    return len({stage_of(v) for v in graph.successors[virtual_stage]} - {stage_of(virtual_stage)})
