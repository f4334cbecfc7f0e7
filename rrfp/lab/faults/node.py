"""One rank of a simulated run with faults, and what watches it."""

from __future__ import annotations

from collections.abc import Mapping

from rrfp.core.stage_core import StageCore
from rrfp.lab.cluster.checker import RankChecker
from rrfp.lab.cluster.node import Node
from rrfp.lab.cluster.ranks import Rank
from rrfp.lab.faults.checker import MessageChecker
from rrfp.lab.faults.dataflow import Reference, StageValues
from rrfp.lab.faults.scenario import Scenario
from rrfp.model.tasks import StepId, Task


class FaultChecker(RankChecker):
    """Collects what is wrong on one rank; values and gradients must be those of the reference."""

    #: Of the step that is open.
    reference: Reference

    def __init__(self, rank: Rank, scenario: Scenario) -> None:
        graph, limit, parallelism = scenario.graph, scenario.limits[rank.stage], scenario.parallelism
        # One forward of each chunk may start on any size: the first, whose size is unknown, and one while nothing is
        # held from its chunk on. In a forced order so may the lowest microbatch of each.
        extra = graph.placement.chunks_of(rank.stage) * max(parallelism.bytes_held) * (2 if scenario.in_order else 1)
        most_bytes = None if limit.bytes is None else limit.bytes + extra
        super().__init__(rank, graph, limit, most_bytes, scenario.visits_of)
        self.violations: list[str] = []

    def object_to(self, what: str) -> None:
        """Keep it for the report."""
        self.violations.append(self.named(what))

    def compare(self, task: Task, value: int) -> None:
        """``task`` has computed ``value``."""
        if value != self.reference.values.get(task):
            self.object_to(f"computed a wrong value in {task}: it read a wrong or stale input")

    def compare_gradients(self, gradients: Mapping[int, int], expected: Mapping[int, int]) -> None:
        """The step is done, with these sums over replicas by virtual stage."""
        for v, gradient in expected.items():
            if gradients.get(v, 0) != gradient:
                self.object_to(f"has a wrong gradient on virtual stage {v}")


class FaultNode(Node):
    """One rank of a run."""

    checker: FaultChecker

    def __init__(self, rank: Rank, core: StageCore, scenario: Scenario) -> None:
        super().__init__(rank, core, FaultChecker(rank, scenario))
        self.messages = MessageChecker()
        self.values = StageValues(scenario.graph, rank.salt)
        self._visits_of = scenario.visits_of
        self.running = 0
        self.sums: dict[int, int] = {}

    def open_step(self, step: StepId) -> None:
        """Its next step begins, on nothing."""
        super().open_step(step)
        self.values.open_step(self._visits_of(step))
        self.sums = {}
