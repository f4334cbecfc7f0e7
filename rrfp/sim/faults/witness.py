"""Watches one rank of a run with faults, and works out from the contracts alone what its core must do.

Which message keeps the transport's contract and which breaks it, how much memory is taken, that every task runs once,
where it belongs, on the right inputs. It never asks the core.
"""

from __future__ import annotations

from collections.abc import Mapping

from rrfp.arbiter.group_messages import GroupMessageKind
from rrfp.core.admission import Limit
from rrfp.core.graph import Graph
from rrfp.core.tasks import StepId, Task
from rrfp.sim.faults.dataflow import Reference
from rrfp.sim.faults.faults import Channel, MessageId
from rrfp.sim.faults.group_messages import TO_CORES, Breach, GroupMessageWitness
from rrfp.sim.faults.memory import MemoryWitness
from rrfp.sim.faults.network import Parcel
from rrfp.sim.faults.ranks import Crew, Rank, stage_of_rank


class Witness:
    """Watches one rank.

    Args:
        graph: the dependency graph.
        rank: this rank.
        limit: what its stage may hold.
        crew: how it works together with others.
        is_forced: some kind runs in microbatch order somewhere.
    """

    def __init__(self, graph: Graph, rank: Rank, limit: Limit, crew: Crew, *, is_forced: bool) -> None:
        self._graph = graph
        self._rank = rank
        self._is_numbered = crew.is_numbered
        self.memory = MemoryWitness(
            graph, rank.stage, limit, crew.bytes_held[rank.member], max(crew.bytes_held), is_forced=is_forced
        )
        self._group_messages = GroupMessageWitness()
        #: What the oracle objects to.
        self.objections: list[str] = []
        self.step: StepId | None = None
        self.is_step_over = True
        self._next_number = 0
        #: What came a step early, for the core and for its arbiter.
        self._early: list[Parcel] = []
        self._early_group_messages: list[Parcel] = []
        self._due: dict[Channel, int] = {}
        self._seen: set[tuple[Task, int, bool]] = set()
        self._reference: Reference | None = None
        self._enqueued: set[Task] = set()
        self._completed: set[Task] = set()

    # Messages.

    def open_step(self, step: StepId, reference: Reference) -> tuple[Breach | None, Breach | None]:
        """The step opens, and what came early is taken in; returns the first breach for the arbiter, and the core."""
        self.step, self.is_step_over, self._reference = step, False, reference
        self._next_number = step.number + 1
        self._due, self._seen = {}, set()
        self._group_messages.open()
        self.memory.open(step)
        self._enqueued, self._completed = set(), set()
        from_group, self._early_group_messages = self._early_group_messages, []
        early, self._early = self._early, []
        first, second = ([b for parcel in some if (b := self.arrive(parcel))] for some in (from_group, early))
        return (first[0] if first else None), (second[0] if second else None)

    def is_early(self, parcel: Parcel) -> bool:
        """Whether ``parcel`` is for the step that opens next."""
        answers = isinstance(parcel.id, MessageId) and parcel.id.is_credit
        answers |= parcel.group_message is not None and parcel.group_message.kind is GroupMessageKind.HELD
        return parcel.step.number == self._next_number and not answers

    def arrive(self, parcel: Parcel) -> Breach | None:
        """``parcel`` reaches the rank; returns how it breaks the contract, if it does."""
        message = parcel.group_message
        if self.is_early(parcel):
            is_for_core = message is None or message.kind in TO_CORES
            (self._early if is_for_core else self._early_group_messages).append(parcel)
            return None
        if message is not None:
            return self._group_messages.arrive(parcel, self.step, is_over=self.is_step_over)
        one = parcel.id
        assert isinstance(one, MessageId)
        task, sender = str(one.task), f"stage {stage_of_rank(one.sender)}"
        if self.step is None or parcel.step != self.step or self.is_step_over:
            return Breach(parcel, "belongs to another step", (task, sender, f"step {parcel.step.number}"))
        has_come = (one.task, one.sender, one.is_credit) in self._seen
        self._seen.add((one.task, one.sender, one.is_credit))
        if one.is_credit:
            self.memory.consume(one.task, stage_of_rank(one.sender))
        if one.is_credit or not self._is_numbered:
            return (
                Breach(parcel, "arrived twice", (task, sender) if one.is_credit else (task, "twice"))
                if has_come
                else None
            )
        due = self._due.get(one.channel, 0)
        self._due[one.channel] = max(due, parcel.place + 1)
        if parcel.place < due:
            return Breach(parcel, "arrived twice", (task, "twice"))
        if parcel.place > due:
            return Breach(parcel, "overtook another message, or that was lost", (task, sender, f"message {due} is due"))
        return None

    def lacks(self, task: Task, step: StepId) -> list[Task]:
        """What ``task`` needs from other stages in ``step`` and has not come."""
        where = self._graph.placement.stage_of
        sources = [one for one in self._graph.inputs(task) if where(one.virtual_stage) != self._rank.stage]
        if step != self.step:
            return sources
        come = {task for task, _, is_credit in self._seen if not is_credit}
        return [one for one in sources if one not in come]

    # Tasks.

    def enqueued(self, task: Task) -> None:
        """The core started ``task``."""
        if self._graph.placement.stage_of(task.virtual_stage) != self._rank.stage:
            self.object_to(f"started {task}, which runs elsewhere")
        if task in self._enqueued:
            self.object_to(f"started {task} twice")
        self._enqueued.add(task)
        if wrong := self.memory.enqueue(task):
            self.object_to(wrong)

    def completed(self, task: Task, value: int) -> None:
        """``task`` has computed ``value``."""
        assert self._reference is not None
        if value != self._reference.values.get(task):
            self.object_to(f"computed a wrong value in {task}: it read a wrong or stale input")
        self._completed.add(task)
        if wrong := self.memory.complete(task):
            self.object_to(wrong)

    def finish_step(self, gradients: Mapping[int, int], expected: Mapping[int, int]) -> None:
        """The core says that its step is done.

        Args:
            gradients: by virtual stage, what the rank has, summed over replicas.
            expected: what it must have.
        """
        assert self.step is not None
        self.is_step_over = True
        undone = {*self._graph.tasks(self._rank.stage, self.step.microbatches, self.step.mode)} - self._completed
        if undone:
            self.object_to(f"finished without {' '.join(map(str, sorted(undone)))}")
        for v in self._graph.placement.virtual_stages(self._rank.stage):
            if gradients.get(v, 0) != expected.get(v, 0):
                self.object_to(f"has a wrong gradient on virtual stage {v}")

    def object_to(self, what: str) -> None:
        """Something is wrong."""
        self.objections.append(f"{self._rank.name} {what}, in {self.step}")
