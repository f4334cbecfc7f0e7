"""Watches one rank of a run with faults, and works out from the contracts alone what its core must do.

Which message keeps the transport's contract and which breaks it, how much memory is taken, that every task runs once,
where it belongs, on the right inputs. It never asks the core.
"""

from __future__ import annotations

from collections.abc import Mapping

from rrfp.arbiter.group_messages import GroupMessage, GroupMessageKind
from rrfp.core import events as ev
from rrfp.core.admission import Limit
from rrfp.core.graph import Graph
from rrfp.core.tasks import Mode, StepId, Task
from rrfp.sim.cluster.checker import MemoryChecker, RankChecker
from rrfp.sim.cluster.ranks import Rank, stage_of_rank
from rrfp.sim.faults.crew import Crew
from rrfp.sim.faults.dataflow import Reference
from rrfp.sim.faults.faults import Channel
from rrfp.sim.faults.group_messages import TO_CORES, Breach, GroupMessageChecker
from rrfp.sim.faults.network import Parcel


class FaultChecker(RankChecker):
    """Watches one rank.

    Args:
        graph: the dependency graph.
        rank: this rank.
        limit: what its stage may hold.
        crew: how it works together with others.
        is_forced: some kind runs in microbatch order somewhere.

    Attributes:
        objections: what is wrong.
        is_step_over: whether the core has said that its step is done.
    """

    def __init__(self, graph: Graph, rank: Rank, limit: Limit, crew: Crew, *, is_forced: bool) -> None:
        # One forward of each chunk may start on any size: the first, whose size is unknown, and one while nothing is
        # held from its chunk on. In a forced order so may the lowest microbatch of each.
        extra = graph.placement.chunks * max(crew.bytes_held) * (2 if is_forced else 1)
        most_bytes = None if limit.bytes is None else limit.bytes + extra
        super().__init__(graph, rank.stage, MemoryChecker(graph, rank.stage, limit, most_bytes), self._object_to)
        self.objections: list[str] = []
        self.is_step_over = True
        self._rank = rank
        self._bytes_held = crew.bytes_held[rank.member]
        self._is_numbered = crew.is_numbered
        self._from_group = GroupMessageChecker()
        self._next_number = 0
        #: What came a step early, for the core and for its arbiter.
        self._early: list[Parcel] = []
        self._early_from_group: list[Parcel] = []
        self._due: dict[Channel, int] = {}
        self._seen: set[tuple[Task, int, bool]] = set()
        self._reference: Reference | None = None

    # Messages.

    def open_step(self, step: StepId, reference: Reference) -> tuple[Breach | None, Breach | None]:
        """The step opens, and what came early is taken in; returns the first breach for the arbiter, and the core."""
        self.open(step)
        self.is_step_over, self._reference = False, reference
        self._next_number = step.number + 1
        self._due, self._seen = {}, set()
        self._from_group.open()
        from_group, self._early_from_group = self._early_from_group, []
        early, self._early = self._early, []
        first, second = ([b for parcel in some if (b := self.judge(parcel))] for some in (from_group, early))
        return (first[0] if first else None), (second[0] if second else None)

    def is_early(self, parcel: Parcel) -> bool:
        """Whether ``parcel`` is for the step that opens next."""
        content = parcel.content
        answers = isinstance(content, ev.Consumed)
        answers |= isinstance(content, GroupMessage) and content.kind is GroupMessageKind.HELD
        return parcel.step.number == self._next_number and not answers

    def judge(self, parcel: Parcel) -> Breach | None:
        """``parcel`` reaches the rank; returns how it breaks the contract, if it does."""
        content = parcel.content
        if self.is_early(parcel):
            is_for_core = not isinstance(content, GroupMessage) or content.kind in TO_CORES
            (self._early if is_for_core else self._early_from_group).append(parcel)
            return None
        if isinstance(content, GroupMessage):
            return self._from_group.judge(parcel, self.step, is_over=self.is_step_over)
        assert content is not None, "a message without content"
        task, sender = str(content.task), f"stage {stage_of_rank(parcel.id.sender)}"
        if self.step is None or parcel.step != self.step or self.is_step_over:
            return Breach(parcel, "belongs to another step", (task, sender, f"step {parcel.step.number}"))
        key = (content.task, int(parcel.id.sender), isinstance(content, ev.Consumed))
        is_second = key in self._seen
        self._seen.add(key)
        if isinstance(content, ev.Consumed):
            self.memory.consume(content.task, content.peer)
            return Breach(parcel, "arrived twice", (task, sender)) if is_second else None
        self.arrive(parcel.step, content.task)
        if not self._is_numbered:
            return Breach(parcel, "arrived twice", (task, "twice")) if is_second else None
        return self._out_of_order(parcel, task, sender)

    def _out_of_order(self, parcel: Parcel, task: str, sender: str) -> Breach | None:
        due = self._due.get(parcel.id.channel, 0)
        self._due[parcel.id.channel] = max(due, parcel.number + 1)
        if parcel.number < due:
            return Breach(parcel, "arrived twice", (task, "twice"))
        if parcel.number > due:
            return Breach(parcel, "overtook another message, or that was lost", (task, sender, f"message {due} is due"))
        return None

    # Tasks.

    def bytes_after(self, task: Task) -> int:
        """The bytes that ``task`` leaves behind for its microbatch."""
        is_last = task.kind is self._graph.last_kind(task.virtual_stage, Mode.TRAIN)
        return 0 if is_last else self._bytes_held

    def compute(self, task: Task, value: int) -> None:
        """``task`` has computed ``value``, and completed."""
        assert self._reference is not None, "no step was opened"
        if value != self._reference.values.get(task):
            self.object_to(f"computed a wrong value in {task}: it read a wrong or stale input")
        self.complete(task, self.bytes_after(task))

    def finish_step(self, gradients: Mapping[int, int], expected: Mapping[int, int]) -> None:
        """The core says that its step is done.

        Args:
            gradients: by virtual stage, the sums of the rank over replicas.
            expected: what they must be.
        """
        assert self.step is not None, "no step was opened"
        self.is_step_over = True
        self.finish(self.step)
        for v in self._graph.placement.virtual_stages(self._stage):
            if gradients.get(v, 0) != expected.get(v, 0):
                self.object_to(f"has a wrong gradient on virtual stage {v}")

    def _object_to(self, what: str) -> None:
        self.objections.append(f"{self._rank.name} {what}, in {self.step}")
