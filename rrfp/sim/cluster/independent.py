"""No coordination: every rank runs what its own core says. For strict schedules, which are one order on all ranks.

With any other hint the ranks of a group sooner or later run different tasks; real collectives then hang or compute
nonsense, and the simulator refuses (`rrfp.sim.cluster.rank_group`).
"""

from __future__ import annotations

from rrfp.core import events as ev
from rrfp.core.tasks import Task
from rrfp.sim.cluster.engine import TensorParallelEngine
from rrfp.sim.cluster.rank_group import RankGroup
from rrfp.sim.cluster.result import GroupCounts


class IndependentCoordinator:
    """Implements `rrfp.sim.cluster.engine.Coordinator`.

    Args:
        engine: moves time.
    """

    def __init__(self, engine: TensorParallelEngine) -> None:
        self._engine = engine

    def follow(self, group: RankGroup, rank: int, instruction: ev.Instruction) -> None:
        """Cores outside a group report and order nothing."""

    def note_arrival(self, group: RankGroup, rank: int, producer: Task) -> None:
        """Only the rank itself cares."""

    def decide(self, group: RankGroup) -> None:
        """Every rank with a free lane takes what its core says."""
        for rank in sorted(group.told):
            if not group.num_pending(rank) and (choice := group.cores[rank].decide()) is not None:
                self._engine.enqueue(group, rank, choice.task)
        group.told.clear()

    def counts(self, group: RankGroup) -> GroupCounts:
        """Nobody says a word."""
        return GroupCounts()

    def stalled(self, group: RankGroup) -> str | None:
        """Ranks wait for each other only while one lacks a message."""
        return None
