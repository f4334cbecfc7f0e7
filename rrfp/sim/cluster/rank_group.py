"""One stage of T ranks in the simulator: their cores, and the one lane that collectives inside tasks make of T lanes.

Every rank enqueues tasks in its own order. A task starts when all ranks have it at the head of their lanes, and ends on
all of them at once. Knows no time and no coordination; it refuses ranks that would run different collectives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rrfp.core import events as ev
from rrfp.core.stage_core import StageCore
from rrfp.core.tasks import Task
from rrfp.core.usage import WaitCause
from rrfp.errors import ProtocolError


class RankGroup:
    """See the module's docstring.

    Args:
        stage: which stage.
        cores: one a rank.
        witness: one more core of the stage, told only what is true of all ranks, without delay: what it would run is
            ready on every rank. It never decides anything.
    """

    def __init__(self, stage: int, cores: Sequence[StageCore], witness: StageCore) -> None:
        self.stage = stage
        self.cores = cores
        self.witness = witness
        #: Ranks whose core was told something since they were last asked.
        self.told: set[int] = set(range(len(cores)))
        #: What each rank has enqueued, in its order.
        self.orders: list[list[Task]] = [[] for _ in cores]
        self.num_completed = 0
        #: The task on the lane.
        self.running: Task | None = None
        # The group's order as far as any rank has gone, and on how many ranks each place is filled.
        self._order: list[Task] = []
        self._num_joined: list[int] = []
        self._num_arrived: Counter[Task] = Counter()
        self._wait_cause: WaitCause | None = None
        self._is_witness_told = True

    def num_pending(self, rank: int) -> int:
        """Tasks that ``rank`` has enqueued and not completed."""
        return len(self.orders[rank]) - self.num_completed

    def join(self, rank: int, task: Task) -> None:
        """``rank`` has ``task`` on its lane, behind what it enqueued before.

        Raises:
            ProtocolError: if another rank has another task at this place: their collectives would not match.
        """
        place = len(self.orders[rank])
        if place == len(self._order):
            self._order.append(task)
            self._num_joined.append(0)
        if self._order[place] != task:
            raise ProtocolError(
                f"collective mismatch on stage {self.stage}: rank {rank} runs {task} as number {place} of the step, "
                f"where another rank runs {self._order[place]}"
            )
        self.orders[rank].append(task)
        self._num_joined[place] += 1

    def startable(self) -> Task | None:
        """The task that all lanes have at their heads, if they are free."""
        place = self.num_completed
        if self.running is not None or place == len(self._order) or self._num_joined[place] < len(self.cores):
            return None
        return self._order[place]

    def start(self, task: Task) -> None:
        """All ranks begin ``task``."""
        self.running = task
        self._tell_witness(ev.Enqueued(task))

    def complete(self, event: ev.Completed) -> None:
        """All ranks have ended the task that they ran; their cores are told apart."""
        self.running = None
        self.num_completed += 1
        self._tell_witness(event)

    def arrive(self, event: ev.Arrived) -> None:
        """One more rank has this message; its core is told apart."""
        self._num_arrived[event.task] += 1
        if self._num_arrived[event.task] == len(self.cores):
            self._tell_witness(event)

    def wait_cause(self) -> WaitCause | None:
        """Why the lane is idle, or None while it is not; ORDER: a task is ready on all ranks."""
        if self.running is not None:
            return None
        if self._is_witness_told:
            self._is_witness_told = False
            is_ready = self.witness.decide() is not None
            self._wait_cause = WaitCause.ORDER if is_ready else self.witness.wait_cause()
        return self._wait_cause

    def _tell_witness(self, event: ev.Event) -> None:
        # It has no peers and nothing to reduce: nothing that it asks for matters.
        self.witness.apply(event)
        self._is_witness_told = True
