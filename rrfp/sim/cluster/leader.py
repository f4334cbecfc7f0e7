"""Coordination by a leader: rank 0 of each group decides over what is ready on all ranks, and the others run its log.

The cores do all of it (`rrfp.core.order_log.Group`); here their reports and orders take time.
"""

from __future__ import annotations

from functools import partial

from rrfp.core import events as ev
from rrfp.core.hint import Hint, View
from rrfp.core.ready_set import ReadySet
from rrfp.core.tasks import Task
from rrfp.sim.cluster.engine import TensorParallelEngine
from rrfp.sim.cluster.rank_group import RankGroup
from rrfp.sim.cluster.result import GroupCounts


class NeverAsked(Hint):
    """A follower's hint: its core runs the log."""

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        """Never called.

        Raises:
            AssertionError: if it is.
        """
        raise AssertionError(f"a follower of stage {view.stage} was asked to choose")


class LeaderCoordinator:
    """Implements `rrfp.sim.cluster.engine.Coordinator`.

    Args:
        engine: moves time.
        depth: tasks that a rank has enqueued and not completed, at most.
        control_seconds: how long a report or an order travels.
    """

    def __init__(self, engine: TensorParallelEngine, *, depth: int, control_seconds: float) -> None:
        self._engine = engine
        self._depth = depth
        self._control = control_seconds
        self._num_messages = [0] * len(engine.groups)

    def follow(self, group: RankGroup, rank: int, instruction: ev.Instruction) -> None:
        """A report goes to the leader, an order to every follower."""
        step = self._engine.step
        if isinstance(instruction, ev.ReportReady):
            self._num_messages[group.stage] += 1
            report = ev.ReadyReported(step, rank, instruction.task)
            self._engine.after(self._control, partial(self._engine.tell, group, 0, report))
        elif isinstance(instruction, ev.Order):
            self._num_messages[group.stage] += len(group.cores) - 1
            ordered = ev.Ordered(step, instruction.sequence, instruction.task)
            self._engine.after(self._control, partial(self._broadcast, group, ordered))

    def note_arrival(self, group: RankGroup, rank: int, producer: Task) -> None:
        """The core has reported it already, where that was due."""

    def decide(self, group: RankGroup) -> None:
        """The leader decides; followers whose log, inputs or lane changed take their next entries."""
        if 0 in group.told:
            self._fill(group, 0)
        for rank in sorted(group.told - {0}):
            self._fill(group, rank)
        group.told.clear()

    def counts(self, group: RankGroup) -> GroupCounts:
        """A round is an entry of the log; none fails. A group of one has nothing to agree on."""
        rounds = len(group.orders[0]) if len(group.cores) > 1 else 0
        return GroupCounts(rounds, messages=self._num_messages[group.stage])

    def stalled(self, group: RankGroup) -> str | None:
        """The leader always runs what is ready on all ranks, if its hint wants it."""
        return None

    def _broadcast(self, group: RankGroup, ordered: ev.Ordered) -> None:
        for rank in range(1, len(group.cores)):
            self._engine.tell(group, rank, ordered)

    def _fill(self, group: RankGroup, rank: int) -> None:
        core = group.cores[rank]
        while group.num_pending(rank) < self._depth and (choice := core.decide()) is not None:
            self._engine.enqueue(group, rank, choice.task)
