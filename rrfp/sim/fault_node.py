"""One stage of a simulated run with faults, and what is left of a run when it has ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from rrfp.core.stage_core import StageCore
from rrfp.core.tasks import StepId, Task
from rrfp.errors import Origin
from rrfp.sim.fault_network import Network
from rrfp.sim.fault_oracle import Ending, Witness
from rrfp.sim.fault_stall import Stall
from rrfp.sim.fault_values import StageValues


class Node:
    """One stage of a run.

    Args:
        core: the core under test.
        values: what the stage holds.
        witness: what the core must do.
    """

    def __init__(self, core: StageCore, values: StageValues, witness: Witness) -> None:
        self.core = core
        self.values = values
        self.witness = witness
        self.stage = core.stage
        #: Tasks enqueued and not complete; the first runs, and will have computed `running`.
        self.lane: deque[Task] = deque()
        self.running = 0
        #: Every task that began, and when, in seconds.
        self.starts: list[tuple[Task, float]] = []
        #: Steps that it has ended.
        self.num_finished = 0
        #: Why it was aborted, and what it told its peers about that.
        self.origin: Origin | None = None
        self.aborts: list[Origin] = []

    @property
    def step(self) -> StepId:
        """The step that it is in, or was in last."""
        assert self.witness.step is not None, "no step was opened"
        return self.witness.step


@dataclass(frozen=True, slots=True)
class Run:
    """What became of a scenario.

    Attributes:
        nodes: the stages, as they are at the end.
        network: the links.
        ending: how it ended.
        text: the error that it ended with, or empty.
        objections: what was wrong on the way.
    """

    nodes: tuple[Node, ...]
    network: Network
    ending: Ending
    text: str
    objections: tuple[str, ...]


def stall_of(nodes: Sequence[Node]) -> Stall:
    """Who waits for what, once nothing can happen any longer."""
    return Stall([node.core for node in nodes], [node.witness.step for node in nodes])
