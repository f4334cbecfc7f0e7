"""What one simulated step of tensor-parallel groups did, and what coordination cost in it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from rrfp.core.usage import Peaks, WaitCause
from rrfp.engine.record import EngineResult
from rrfp.model.tasks import Task


@dataclass(frozen=True, slots=True)
class GroupCounts:
    """What the ranks of one group did to agree."""

    #: Decisions taken together: entries of the leader's log, or all-gathers.
    rounds: int = 0
    #: Those after which no task ran.
    failed_rounds: int = 0
    #: Failed ones in which two ranks proposed different tasks; in the others some ranks had nothing.
    disputed_rounds: int = 0
    #: Words from one rank to another rank of the group, however a collective routes them.
    messages: int = 0


@dataclass(frozen=True)
class TensorParallelResult(EngineResult):
    """One simulated step, a group as one stage: all its ranks start and end a task together.

    Attributes:
        waits: why the lanes of a group were idle, up to the makespan. ORDER: a task was ready on *all* ranks, and
            coordination kept it (the step's TP coordination); any other cause: none was (blocked).
        messages: messages between stages, each with the arrival on its last rank.
        peaks: for each stage, the most that any of its ranks held.
        orders: for each stage and rank, what the rank ran.
        rank_peaks: for each stage and rank, the most that it held.
        counts: for each stage, what agreeing took.
    """

    orders: tuple[tuple[tuple[Task, ...], ...], ...]
    rank_peaks: tuple[tuple[Peaks, ...], ...]
    counts: tuple[GroupCounts, ...]

    @property
    def ranks(self) -> int:
        """T, ranks a group."""
        return len(self.orders[0])

    @cached_property
    def num_tasks(self) -> int:
        """Tasks of all groups; one that T ranks run together counts once."""
        return sum(map(len, self.spans))

    @cached_property
    def coordination(self) -> tuple[float, ...]:
        """For each stage, seconds in which its lanes were idle although a task was ready on all ranks."""
        return self._waited(coordinating=True)

    @cached_property
    def blocked(self) -> tuple[float, ...]:
        """For each stage, seconds in which its lanes were idle and no task was ready on all ranks."""
        return self._waited(coordinating=False)

    @property
    def coordination_share(self) -> float:
        """Part of the step that the mean stage lost to coordination, 0..1."""
        return sum(self.coordination) / (len(self.spans) * self.makespan) if self.makespan else 0.0

    @property
    def blocked_share(self) -> float:
        """Part of the step in which the mean stage was blocked, 0..1."""
        return sum(self.blocked) / (len(self.spans) * self.makespan) if self.makespan else 0.0

    @property
    def rounds_per_task(self) -> float:
        """Decisions taken together for each task, failed ones included."""
        return sum(counts.rounds for counts in self.counts) / self.num_tasks

    @property
    def failed_rounds_per_task(self) -> float:
        """Rounds in vain for each task."""
        return sum(counts.failed_rounds for counts in self.counts) / self.num_tasks

    @property
    def disputed_rounds_per_task(self) -> float:
        """Rounds in vain for each task in which two ranks proposed different ones."""
        return sum(counts.disputed_rounds for counts in self.counts) / self.num_tasks

    @property
    def messages_per_task(self) -> float:
        """Words between ranks of a group for each task."""
        return sum(counts.messages for counts in self.counts) / self.num_tasks

    def _waited(self, *, coordinating: bool) -> tuple[float, ...]:
        seconds = [0.0] * len(self.spans)
        for wait in self.waits:
            if (wait.cause is WaitCause.ORDER) is coordinating:
                seconds[wait.stage] += wait.end - wait.start
        return tuple(seconds)
