"""One rank of a simulated run with faults, and what is left of a run when it has ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rrfp.core.stage_core import StageCore
from rrfp.core.tasks import StepId, Task
from rrfp.errors import Origin
from rrfp.sim.cluster.node import Node
from rrfp.sim.cluster.ranks import Rank
from rrfp.sim.faults.checker import Ending
from rrfp.sim.faults.dataflow import StageValues
from rrfp.sim.faults.deadlock_report import Stall
from rrfp.sim.faults.network import Network
from rrfp.sim.faults.rank_checker import FaultChecker


class FaultNode(Node):
    """One rank of a run.

    Args:
        rank: which.
        core: the core under test.
        values: what the rank holds.
        checker: what the core must do.

    Attributes:
        running: what the task on its lane will have computed.
        sums: gradients of this step, by virtual stage, summed over replicas.
        starts: every task that began, and when, in seconds.
        aborts: the origins that it passed on to its peers.
    """

    def __init__(self, rank: Rank, core: StageCore, values: StageValues, checker: FaultChecker) -> None:
        super().__init__(rank, core)
        self.values = values
        self.checker = checker
        self.running = 0
        self.sums: dict[int, int] = {}
        self.starts: list[tuple[Task, float]] = []
        self.aborts: list[Origin] = []

    def open_step(self, step: StepId) -> None:
        """Its next step begins, on nothing."""
        super().open_step(step)
        self.values.open_step()
        self.sums = {}


@dataclass(frozen=True, slots=True)
class Run:
    """What became of a scenario.

    Attributes:
        nodes: the ranks, as they are at the end.
        network: the links.
        ending: how it ended.
        text: the error that it ended with, or empty.
        objections: what was wrong on the way.
        origin: the first failure, if there was one.
    """

    nodes: tuple[FaultNode, ...]
    network: Network
    ending: Ending
    text: str
    objections: tuple[str, ...]
    origin: Origin | None = None


def stall_of(nodes: Sequence[FaultNode]) -> Stall:
    """Who waits for what, once nothing can happen any longer."""
    return Stall(nodes)
