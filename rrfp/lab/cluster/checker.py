"""Counts anew what one rank of a simulated cluster runs and holds. It never asks the core.

Every task runs once, where it belongs, after all of its inputs; D and bytes keep their limits.
"""

from __future__ import annotations

from collections.abc import Callable

from rrfp.lab.cluster.ranks import Rank
from rrfp.memory.admission import Limit, rule_of
from rrfp.memory.byte_limit import ByteLimit
from rrfp.memory.rules import MemoryRule, RuleContext, SlotCounts
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import KINDS, Mode, StepId, Task
from rrfp.model.visits import Visits


class MemoryChecker:
    """Counts the slots (D) and bytes that one rank holds."""

    def __init__(
        self, graph: TaskGraph, stage: int, limit: Limit, most_bytes: int | None = None, *, is_forced: bool = False
    ) -> None:
        self._graph = graph
        self._stage = stage
        self._chunk_of = {v: chunk for chunk, v in enumerate(graph.placement.virtual_stages(stage))}
        self._last_kinds = [graph.last_kind(v, Mode.TRAIN) for v in range(graph.placement.num_virtual_stages)]
        self._asked = limit.rule
        # Counted here once more: what the limit makes of K is the core's.
        self._slots = None if limit.microbatches is None else limit.microbatches * len(self._chunk_of)
        self._most_bytes = most_bytes
        #: Whether some task of the pipeline has to run in microbatch order.
        self._is_forced = is_forced
        self._mode = Mode.TRAIN
        self._visits = Visits(0)
        self._rule: type[MemoryRule] = MemoryRule
        self._counts = SlotCounts([()] * len(self._chunk_of))
        self._num_bytes = 0
        self._bytes: dict[tuple[int, int], int] = {}
        #: Forward only: readers of a forward that have not consumed its output: a stage, or a task here.
        self._readers: dict[Task, set[int | Task]] = {}
        #: The most bytes held after any task, outputs not counted.
        self.peak_bytes = 0

    def open(self, step: StepId, visits: Visits) -> None:
        self._visits = visits
        self._mode, self._num_bytes = step.mode, 0
        self._rule = rule_of(self._asked, RuleContext(self._graph, self._stage, visits, step.mode, self._is_forced))
        self._counts = SlotCounts([visits.visitors(v) for v in self._chunk_of])
        self._bytes, self._readers = {}, {}

    def enqueue(self, task: Task) -> str | None:
        """``task`` was started; returns what is wrong with that, if anything."""
        # A lane runs its tasks in order: D as it is when the lane comes to this one.
        _, microbatch, virtual_stage = task
        wrong = None
        if KINDS[task.kind].takes_slot:
            self._counts.take(self._chunk_of[virtual_stage], microbatch)
            if self._slots is not None and (found := self._rule.validate(self._slots, self._counts)) is not None:
                wrong = f"{found}, after starting {task}"
        if self._mode is Mode.TRAIN and self._is_last(task):
            self._counts.give_back(self._chunk_of[virtual_stage], microbatch)
        return wrong

    def complete(self, task: Task, num_bytes: int) -> str | None:
        """``task`` has left ``num_bytes``; returns what is wrong with that, if anything."""
        self._keep(task, 0 if self._is_last(task) else num_bytes)
        self.peak_bytes = max(self.peak_bytes, self._num_bytes)
        wrong = None if self._most_bytes is None else ByteLimit.validate(self._most_bytes, self._num_bytes)
        if wrong is not None:
            wrong = f"{wrong}, after {task}"
        if self._mode is Mode.FORWARD:
            self._await_readers(task)
        return wrong

    def num_free(self, virtual_stage: int) -> int | None:
        """The slots that the staircase leaves to its forwards."""
        kept = len(self._chunk_of) - 1 - self._chunk_of[virtual_stage]
        return None if self._slots is None else self._slots - kept - self._counts.held

    @property
    def most_held(self) -> int | None:
        """The bound on D in this step."""
        return None if self._slots is None else self._rule.bound(self._slots, len(self._chunk_of))

    def consume(self, task: Task, reader: int | Task) -> None:
        """Forward only: ``reader``, a stage or a task here, needs ``task`` no longer."""
        readers = self._readers.get(task)
        if readers is not None:
            readers.discard(reader)
            self._forget_if_read(task, readers)

    def _keep(self, task: Task, num_bytes: int) -> None:
        """From now on the microbatch and chunk of ``task`` hold ``num_bytes``."""
        key = task.microbatch, task.virtual_stage
        self._num_bytes += num_bytes - self._bytes.get(key, 0)
        self._bytes[key] = num_bytes

    def _is_last(self, task: Task) -> bool:
        return task.kind is self._last_kinds[task.virtual_stage]

    def _await_readers(self, task: Task) -> None:
        stage_of = self._graph.stage_of
        for source in self._graph.inputs(task):
            if stage_of[source.virtual_stage] == self._stage:
                self.consume(source, task)
        readers = [task._replace(virtual_stage=w) for w in self._graph.successors[task.virtual_stage]]
        readers = [reader for reader in readers if self._visits.exists(reader)]
        stages = [stage_of[reader.virtual_stage] for reader in readers]
        self._readers[task] = {r if s == self._stage else s for r, s in zip(readers, stages, strict=True)}
        self._forget_if_read(task, self._readers[task])

    def _forget_if_read(self, task: Task, readers: set[int | Task]) -> None:
        if not readers:
            self._readers.pop(task, None)
            self._keep(task, 0)
            self._counts.give_back(self._chunk_of[task.virtual_stage], task.microbatch)


class RankChecker:
    """Checks what one rank runs."""

    def __init__(
        self,
        rank: Rank,
        graph: TaskGraph,
        limit: Limit,
        most_bytes: int | None = None,
        visits_of: Callable[[StepId], Visits] = lambda step: Visits(step.microbatches),
        *,
        is_forced: bool = False,
        # Where replicas share forwards, how many the rank has claimed and not begun at most; 0: they do not.
        claims: int = 0,
    ) -> None:
        self.memory = MemoryChecker(graph, rank.stage, limit, most_bytes, is_forced=is_forced)
        self._most_claims = claims
        #: Forwards of this step that it has claimed and not begun, and which no other copy runs.
        self._claimed: set[Task] = set()
        #: By step, the forwards that other copies run, as it has heard; messages may come before the step opens.
        self._elsewhere: dict[int, set[Task]] = {}
        self.step: StepId | None = None
        self._rank = rank
        self._graph = graph
        self._visits_of = visits_of
        #: The tasks of this step whose outputs a task here may read: those that arrived or were enqueued.
        self._present: set[Task] = set()
        #: Outputs of later steps that came early, by step.
        self._early: dict[int, set[Task]] = {}
        self._completed: set[Task] = set()

    def object_to(self, what: str) -> None:
        raise AssertionError(self.named(what))

    def named(self, what: str) -> str:
        return f"{self._rank.name} {what}, in {self.step}"

    def open(self, step: StepId) -> None:
        self.step = step
        self._present, self._completed = self._early.pop(step.number, set()), set()
        self._claimed.clear()
        self.memory.open(step, self._visits_of(step))

    def arrive(self, step: StepId, task: Task) -> None:
        if self._runs_here(task):
            self.object_to(f"received {task}, which runs here")
        elif step == self.step:
            self._present.add(task)
        else:
            self._early.setdefault(step.number, set()).add(task)

    def lacks(self, task: Task, step: StepId) -> list[Task]:
        """The outputs that ``task`` needs from other stages and has not got."""
        present = self._present if step == self.step else ()
        return [s for s in self._inputs(task, step) if s not in present and not self._runs_here(s)]

    def enqueue(self, task: Task) -> None:
        assert self.step is not None, "no step was opened"
        if not self._runs_here(task):
            self.object_to(f"started {task}, which runs elsewhere")
        if task in self._present:
            self.object_to(f"started {task} twice")
        for source in self._inputs(task, self.step):
            if source not in self._present:
                self.object_to(f"started {task} before {source}")
        self._present.add(task)
        self._claimed.discard(task)
        if wrong := self.memory.enqueue(task):
            self.object_to(wrong)

    def claim(self, task: Task) -> None:
        """The core claimed ``task``; with what it has, and its other claims, that must fit."""
        assert self.step is not None, "no step was opened"
        if task in self._claimed or task in self._present:
            self.object_to(f"claimed {task} twice")
        if task in self._elsewhere.get(self.step.number, ()):
            return  # the grant came before the step was opened, and the core hears of it next
        self._claimed.add(task)
        # Claims of shallower chunks may wait, and do not count.
        claimed = sum(other.virtual_stage >= task.virtual_stage for other in self._claimed)
        free = self.memory.num_free(task.virtual_stage)
        if claimed > self._most_claims:
            self.object_to(f"has claimed {claimed} forwards, the most allowed is {self._most_claims}")
        if free is not None and claimed > free:
            self.object_to(f"has claimed {claimed} forwards and has room for {free}")

    def granted(self, step: StepId, task: Task) -> None:
        self._elsewhere.setdefault(step.number, set()).add(task)
        if step == self.step:
            self._claimed.discard(task)

    def complete(self, task: Task, num_bytes: int) -> None:
        self._completed.add(task)
        if wrong := self.memory.complete(task, num_bytes):
            self.object_to(wrong)

    def expected(self, step: StepId) -> set[Task]:
        """What the rank has to run; where replicas share forwards, on successive chunks all that it has begun."""
        visits = self._visits_of(step)
        every = {*filter(visits.exists, self._graph.tasks(self._rank.stage, step.microbatches, step.mode))}
        if not self._most_claims or step.mode is not Mode.TRAIN:
            return every
        own = {self._begins(task) for task in self._completed}
        return {task for task in every if self._begins(task) in own}

    def _begins(self, task: Task) -> tuple[int, int]:
        """The microbatch, and the first virtual stage from which on all are on this stage."""
        first, stage_of = task.virtual_stage, self._graph.stage_of
        while first and stage_of[first - 1] == stage_of[first]:
            first -= 1
        return task.microbatch, first

    def finish(self, step: StepId) -> None:
        if step != self.step:
            self.object_to(f"finished {step}")
        expected = self.expected(step)
        if undone := expected - self._completed:
            self.object_to(f"finished without {' '.join(map(str, sorted(undone)))}")
        if strange := self._completed - expected:
            self.object_to(f"ran {' '.join(map(str, sorted(strange)))}, which it does not run in this step")

    def _inputs(self, task: Task, step: StepId) -> list[Task]:
        return [*filter(self._visits_of(step).exists, self._graph.inputs(task))]

    def _runs_here(self, task: Task) -> bool:
        return self._graph.stage_of[task.virtual_stage] == self._rank.stage
