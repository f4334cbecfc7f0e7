"""One rank of a simulated run with faults, and what is left of a run when it has ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rrfp.arbiter.agreement import AgreementArbiter
from rrfp.arbiter.arbiter import Arbiter
from rrfp.arbiter.group_messages import GroupMessage
from rrfp.arbiter.leader import LeaderProtocol
from rrfp.core import events as ev
from rrfp.core.stage_core import StageCore
from rrfp.core.tasks import StepId, Task
from rrfp.core.usage import WaitCause
from rrfp.errors import Origin
from rrfp.sim.faults.checker import Ending
from rrfp.sim.faults.dataflow import StageValues
from rrfp.sim.faults.deadlock_report import Stall
from rrfp.sim.faults.network import Network
from rrfp.sim.faults.ranks import Crew, Rank
from rrfp.sim.faults.witness import Witness

Apply = Callable[["Node", ev.Event], None]
Send = Callable[["Node", int, GroupMessage], None]
Dispatch = Callable[["Node", Task], None]


class Node:
    """One rank of a run.

    Args:
        rank: which.
        core: the core under test.
        values: what the rank holds.
        witness: what the core must do.
    """

    def __init__(self, rank: Rank, core: StageCore, values: StageValues, witness: Witness) -> None:
        self.rank = rank
        self.core = core
        self.values = values
        self.witness = witness
        self.arbiter: Arbiter
        #: What it says in its group: with a leader, or to agree.
        self.leader_protocol: LeaderProtocol | None = None
        self.agreement: AgreementArbiter | None = None
        #: Tasks enqueued and not complete; the first runs, and will have computed `running`.
        self.lane: deque[Task] = deque()
        self.running = 0
        #: Of this step: tasks enqueued, and begun; gradients, by virtual stage, summed over replicas.
        self.num_enqueued = self.num_begun = 0
        self.sums: dict[int, int] = {}
        #: Every task that began, and when, in seconds.
        self.starts: list[tuple[Task, float]] = []
        #: Steps that it has begun, and ended.
        self.num_opened = self.num_finished = 0
        #: Why it was aborted, and what it told its peers about that.
        self.origin: Origin | None = None
        self.aborts: list[Origin] = []

    def join(self, crew: Crew, depth: int, dispatch: Dispatch, send: Send, tell: Apply) -> None:
        """Make its arbiter, and what it needs to run one order with its group."""

        def run(task: Task) -> None:
            dispatch(self, task)

        def speak(member: int, message: GroupMessage) -> None:
            send(self, member, message)

        if crew.agrees:
            self.arbiter = self.agreement = AgreementArbiter(
                self.core, depth, run, _wait, group=crew.group(self.rank), send=speak
            )
            return
        self.arbiter = Arbiter(self.core, depth, run, _wait)
        if crew.is_led:
            reports_bytes = self.core.limit.bytes is not None
            self.leader_protocol = LeaderProtocol(
                self.core.group, speak, lambda event: tell(self, event), reports_bytes=reports_bytes
            )

    def open_step(self) -> None:
        """Its next step begins, on nothing."""
        self.values.open_step()
        self.num_enqueued = self.num_begun = 0
        self.sums = {}
        self.num_opened += 1

    @property
    def step(self) -> StepId:
        """The step that it is in, or was in last."""
        assert self.witness.step is not None, "no step was opened"
        return self.witness.step

    @property
    def step_or_none(self) -> StepId | None:
        """The same; None before its first."""
        return self.witness.step


def _wait(cause: WaitCause) -> None:
    """Why the lane is empty is of no interest here."""


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

    nodes: tuple[Node, ...]
    network: Network
    ending: Ending
    text: str
    objections: tuple[str, ...]
    origin: Origin | None = None


def stall_of(nodes: Sequence[Node]) -> Stall:
    """Who waits for what, once nothing can happen any longer."""
    return Stall(nodes)
