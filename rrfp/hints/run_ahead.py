"""How far encoders run ahead of what reads them, on stages that hold both.

Where an encoder shares stages with the model that reads it, its forwards have their inputs long before the model's do.
A hint that runs whatever is ready fills the memory with encoded microbatches; the few slots that are left then let few
microbatches through the model, and the step takes up to three times as long. With more memory the same run-ahead does
no harm, and a cap on it would.

A chunk is an *encoder chunk* if another chunk of its stage depends on it. A microbatch is *ahead* on it from the start
of its forward there until its forward starts on the last chunk of the stage that depends on it and that the microbatch
visits. Of K microbatches that the limit holds as a whole, with what they skip, at most

    K - min(K, d) / 2

may be ahead on one encoder chunk, d being the stage's distance to the sink: of the d microbatches that keep the stages
behind busy half find room. So a tight limit leaves half of itself to the encoders, and an ample one nearly all. Under a
limit on bytes a whole microbatch is what forwards have left on each chunk on average.

A forward beyond that is held back, and other tasks run. If there is none, the stage waits, and no step hangs by that:

- The lowest microbatch that has forwards to start here is never kept waiting. So the lowest one that is not done
  everywhere goes on where the in-order banker, or the paper's rule, holds: these always admit it.
- On plain stages (`rrfp.memory.branches`), where the staircase may hold and need not admit that one, no forward is kept
  waiting while no dependent chunk of the stage holds a slot. The deepest of all forwards that wait on plain stages is
  such a one: a slot of a deeper chunk would wait for a forward still further down. And the staircase admits it, as
  docs/memory-rules.md proves.

It applies to training on graphs that are no chains, under a limit. On chains hints are as they would be without it.
"""

from __future__ import annotations

from rrfp.core.events import Completed, Enqueued, Event
from rrfp.core.hint import Hint, View
from rrfp.core.ready_set import ChunkOrder, ReadySet
from rrfp.memory.branches import plain_stages
from rrfp.model.tasks import LOCAL_KINDS, F, Kind, Mode, Task


class RunAhead:
    """The microbatches ahead on one stage, and the forwards that may start."""

    def __init__(self) -> None:
        #: Whether it holds forwards back in this step.
        self.is_limited = False
        self._stage: _Stage | None = None
        #: By virtual stage, the forwards that have completed in this run, and the bytes that they left in all.
        self._left: dict[int, tuple[int, int]] = {}

    def open_step(self, view: View) -> None:
        is_bounded = view.slots is not None or view.most_bytes is not None
        self._stage = None
        if view.mode is Mode.TRAIN and is_bounded and not view.graph.is_chain:
            stage = _Stage(view)
            self._stage = stage if any(stage.dependants) else None
        self.is_limited = self._stage is not None

    def observe(self, event: Event) -> None:
        """Follow the forwards of this stage."""
        stage = self._stage
        if stage is None:
            return
        if isinstance(event, Enqueued):
            if event.task.kind is F:
                stage.start(event.task)
        elif isinstance(event, Completed) and event.task.kind is F:
            count, num_bytes = self._left.get(event.task.virtual_stage, (0, 0))
            self._left[event.task.virtual_stage] = count + 1, num_bytes + event.held

    def first_forward(self, ready: ReadySet, view: View, chunk_order: ChunkOrder) -> Task | None:
        """What ``ready.first(F, chunk_order)`` says, of chunks not held back."""
        stage = self._stage
        assert stage is not None, "nothing is limited in this step"
        most = self._most_ahead(stage, view)
        chunks = range(len(stage.virtual_stages))
        for chunk in chunks if chunk_order == "paper" else reversed(chunks):
            if not stage.dependants[chunk] or len(stage.ahead[chunk]) < most:
                task = ready.head(F, chunk)
                if task is not None:
                    return task
        return None

    def last_resort(self, ready: ReadySet, view: View) -> Task | None:
        """The forward that must not wait, where all are held back."""
        stage = self._stage
        assert stage is not None, "nothing is limited in this step"
        if stage.is_plain:
            for chunk, dependants in reversed(list(enumerate(stage.dependants))):
                task = None if any(stage.num_held(view, d) for d in dependants) else ready.head(F, chunk)
                if task is not None:
                    return task
        lowest = (Task(F, stage.lowest, v) for v in reversed(stage.virtual_stages))
        return next((task for task in lowest if task in ready), None)

    def _most_ahead(self, stage: _Stage, view: View) -> float:
        fitting = []
        if view.slots is not None:
            fitting.append(view.slots / sum(stage.visits))
        if view.most_bytes is not None and (num_bytes := self._mean_bytes(stage)):
            fitting.append(view.most_bytes / num_bytes)
        if not fitting:
            return 1
        return max(1, min(fitting) - min(*fitting, stage.distance) / 2)

    def _mean_bytes(self, stage: _Stage) -> float:
        """What a whole microbatch holds; unknown chunks count as the others."""
        shown = {v: total / count for v, (count, total) in self._left.items()}
        if not shown:
            return 0
        other = sum(shown.values()) / len(shown)
        return sum(share * shown.get(v, other) for v, share in zip(stage.virtual_stages, stage.visits, strict=True))


class _Stage:
    def __init__(self, view: View) -> None:
        graph, self._visits = view.graph, view.visits
        self.is_plain = view.stage in plain_stages(graph, self._visits.patterns)
        self.virtual_stages = view.placement.virtual_stages(view.stage)
        self.distance = graph.distance_to_sink(view.stage)
        self._chunk_of = {v: chunk for chunk, v in enumerate(self.virtual_stages)}
        self._frees = [graph.last_kind(v, view.mode) for v in self.virtual_stages]
        #: By chunk, those of this stage that depend on it.
        self.dependants = [[self._chunk_of[w] for w in graph.dependants_here(v)] for v in self.virtual_stages]
        #: By chunk, the share of the microbatches that visit it.
        self.visits = [len(self._visits.visitors(v)) / view.microbatches for v in self.virtual_stages]
        #: By chunk, the microbatches that are ahead.
        self.ahead: list[set[int]] = [set() for _ in self.virtual_stages]
        #: By microbatch, its forwards to start here.
        self._to_start = [len(set(self.virtual_stages) - self._visits.skipped_by(m)) for m in range(view.microbatches)]
        #: The lowest microbatch with forwards to start here; M: none has.
        self.lowest = 0
        self._pass_started()

    def num_held(self, view: View, chunk: int) -> int:
        return view.num_enqueued(F, chunk) - view.num_enqueued(self._frees[chunk], chunk)

    def start(self, forward: Task) -> None:
        _, microbatch, virtual_stage = forward
        chunk = self._chunk_of[virtual_stage]
        if self._awaited(chunk, microbatch) is not None:
            self.ahead[chunk].add(microbatch)
        for earlier in range(chunk):
            if self._awaited(earlier, microbatch) == chunk:
                self.ahead[earlier].discard(microbatch)
        self._to_start[microbatch] -= 1
        self._pass_started()

    def _awaited(self, chunk: int, microbatch: int) -> int | None:
        """The chunk whose forward ends the run-ahead on ``chunk``, if any."""
        skipped = self._visits.skipped_by(microbatch)
        return next((d for d in reversed(self.dependants[chunk]) if self.virtual_stages[d] not in skipped), None)

    def _pass_started(self) -> None:
        while self.lowest < len(self._to_start) and not self._to_start[self.lowest]:
            self.lowest += 1


class EncoderAware(Hint):
    """A hint that limits how far encoders run ahead.

    Its subclasses take ready tasks from `first`, and return `otherwise` where that has neither a forward nor a
    backward. ``may_wait`` holds in steps in which a forward may be held back. ``chunk_order`` says which chunk's
    forwards come first: the deeper one's, or Algorithm 1's, the shallower (``"paper"``).
    """

    def __init__(self, chunk_order: ChunkOrder = "deeper") -> None:
        self.chunk_order: ChunkOrder = chunk_order
        self._run_ahead = RunAhead()

    def first(self, kind: Kind, ready: ReadySet, view: View) -> Task | None:
        if kind is F and self.may_wait:
            return self._run_ahead.first_forward(ready, view, self.chunk_order)
        return ready.first(kind, self.chunk_order)

    def otherwise(self, ready: ReadySet, view: View) -> Task | None:
        """A task that no other stage waits for, such as W; else what must not wait, where all is held back."""
        for kind in LOCAL_KINDS:
            if (task := ready.first(kind)) is not None:
                return task
        return self._run_ahead.last_resort(ready, view) if self.may_wait else None

    def open_step(self, view: View) -> None:
        self._run_ahead.open_step(view)
        self.may_wait = self._run_ahead.is_limited

    def observe(self, event: Event) -> None:
        if self.may_wait:
            self._run_ahead.observe(event)
