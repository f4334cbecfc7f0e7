"""One rank of a simulated cluster: its real core, its checker, what decides for it in its group, and its lane."""

from __future__ import annotations

from collections import deque

from rrfp.arbiter.arbiter import Arbiter, PauseTimer
from rrfp.arbiter.coordination import AgreementArbiter, LeaderProtocol
from rrfp.core.stage_core import StageCore
from rrfp.engine.engine import OfferedSlot
from rrfp.errors import Origin
from rrfp.lab.cluster.checker import RankChecker
from rrfp.lab.cluster.ranks import Rank
from rrfp.model.tasks import StepId, Task


class Node:
    """One rank; the cluster makes its arbiter."""

    arbiter: Arbiter

    def __init__(self, rank: Rank, core: StageCore, checker: RankChecker) -> None:
        self.rank = rank
        self.core = core
        self.checker = checker
        #: Its part in a group under a leader.
        self.leader_protocol: LeaderProtocol | None = None
        #: Its arbiter, where the group agrees by proposals.
        self.agreement: AgreementArbiter | None = None
        #: Times its waits by choice; None where the group agrees by proposals.
        self.pauses: PauseTimer | None = None
        #: Tasks enqueued, or begun from an offer, and not complete; the first runs once its group has begun it.
        self.lane: deque[Task] = deque()
        #: For the task that is offered to its lane; None where lanes take no offers.
        self.slot: OfferedSlot | None = None
        #: For each step that it opened, the tasks in the order in which they were enqueued.
        self.orders: list[list[Task]] = []
        #: How many tasks of this step its lane has reached.
        self.num_begun = self.num_finished = 0
        #: Why it was aborted, if it was.
        self.origin: Origin | None = None
        #: The step that it is in, or was in last; None before its first.
        self.step_or_none: StepId | None = None

    @property
    def step(self) -> StepId:
        assert self.step_or_none is not None, f"{self.rank.name} has not opened a step"
        return self.step_or_none

    @property
    def num_opened(self) -> int:
        return len(self.orders)

    @property
    def order(self) -> list[Task]:
        return self.orders[-1]

    @property
    def num_completed(self) -> int:
        return len(self.order) - len(self.lane)

    def open_step(self, step: StepId) -> None:
        self.step_or_none = step
        self.orders.append([])
        self.num_begun = 0
        self.checker.open(step)
