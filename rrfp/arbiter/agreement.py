"""Agreement without a leader, as in the paper (section 4.3): the baseline that `coordination="agreement"` selects.

Before each task every rank of a group proposes what its own core would run, and all learn all proposals. If they are
equal all run the task, otherwise nobody does, and they propose again once any of them has something else to propose. A
hint whose choice is no pure function of the ready set (measured durations, order of arrival) may never come to an
agreement: that is found like any other deadlock, and reported with the proposals.

The all-gather goes through rank 0 of the group, which collects proposals and announces what came of a round.
"""

from __future__ import annotations

from collections.abc import Callable

from rrfp.arbiter.loop import Arbiter
from rrfp.arbiter.words import Say, Saying, Word
from rrfp.core.order_log import Group
from rrfp.core.progress import WaitCause
from rrfp.core.stage_core import StageCore
from rrfp.core.tasks import StepId, Task
from rrfp.errors import ProtocolError


class AgreementArbiter(Arbiter):
    """Dispatches the tasks of one rank when its group agrees on them. See `Arbiter`.

    Args:
        core: decides what to propose.
        depth: how many tasks may be enqueued and not complete.
        dispatch: hands a task to the lane and reports `Enqueued` to the core.
        waiting: told the cause each time the lane is left with nothing to do.
        group: this rank's.
        say: says a word to a member.

    Attributes:
        rounds: rounds that this rank took part in.
        failed: rounds among them without agreement.
    """

    def __init__(
        self,
        core: StageCore,
        depth: int,
        dispatch: Callable[[Task], None],
        waiting: Callable[[WaitCause], None],
        *,
        group: Group,
        say: Say,
    ) -> None:
        super().__init__(core, depth, dispatch, waiting)
        self.rounds = self.failed = 0
        self._group = group
        self._say = say
        self._step: StepId | None = None
        self._round = 0
        self._proposed: Task | None = None
        #: What this rank proposed when the last round failed: proposing it again alone would change nothing.
        self._refused: Task | None = None
        self._prompted = False
        #: Rank 0 of the group: proposals of rounds not yet decided, by (step, round) and member.
        self._proposals: dict[tuple[StepId, int], dict[int, Task]] = {}
        #: What others said of a step that this rank has not opened yet.
        self._early: list[tuple[int, Word]] = []

    @property
    def dispute(self) -> str | None:
        """What this rank proposes in vain, for a report; None where it waits for nobody's proposal."""
        task = self._proposed or self._refused
        return None if task is None else f"{task} (proposed to its group, which does not agree)"

    def open(self, step: StepId) -> None:
        """The core has opened ``step``."""
        self._step, self._round = step, 0
        self._proposed = self._refused = None
        self._prompted = False
        early, self._early = self._early, []
        for member, word in early:
            self.take(member, word)

    def take(self, member: int, word: Word) -> None:
        """``member`` of the group said ``word``.

        Raises:
            ProtocolError: if it makes no sense.
        """
        if self._step is None or word.step.number > self._step.number:
            self._early.append((member, word))
            return
        match word:
            case Word(Saying.PROPOSE, step, task, (number,)) if task is not None and self._group.rank == 0:
                self._collect(step, number, member, task)
            case Word(Saying.OUTCOME, step, task, (number,)) if step == self._step and member == 0:
                self._conclude(number, task)
            case Word(Saying.PROMPT, step, None, (number,)) if step == self._step and member == 0:
                if number == self._round and self._proposed is None:
                    self._prompted = True
                    self.kick()
            case _:
                raise ProtocolError(f"member {member} of the group says {word}, which makes no sense here")

    def _dispatch_ready(self) -> None:
        if len(self._core.in_flight) < self._depth and self._proposed is None and self._step is not None:
            decision = self._core.decide()
            if decision is not None and (decision.task != self._refused or self._prompted):
                self._propose(decision.task)
        if not self._core.in_flight:
            self._waiting(WaitCause.ORDER if self._proposed or self._refused else self._core.wait_cause())

    def _propose(self, task: Task) -> None:
        assert self._step is not None
        self._proposed, self._prompted = task, False
        word = Word(Saying.PROPOSE, self._step, task, (self._round,))
        if self._group.rank == 0:
            self._collect(self._step, self._round, 0, task)
        else:
            self._say(0, word)

    def _collect(self, step: StepId, number: int, member: int, task: Task) -> None:
        """Rank 0: one more proposal; the first of a round that follows a failed one asks for all others."""
        proposals = self._proposals.setdefault((step, number), {})
        if member in proposals:
            raise ProtocolError(f"member {member} of the group proposes twice in round {number} of {step}")
        if not proposals and self._refused is not None:
            self._broadcast(Word(Saying.PROMPT, step, None, (number,)))
        proposals[member] = task
        if len(proposals) == self._group.size:
            del self._proposals[step, number]
            agreed = task if len(set(proposals.values())) == 1 else None
            self._broadcast(Word(Saying.OUTCOME, step, agreed, (number,)))

    def _broadcast(self, word: Word) -> None:
        for member in range(1, self._group.size):
            self._say(member, word)
        self.take(0, word)

    def _conclude(self, number: int, task: Task | None) -> None:
        if number != self._round or self._proposed is None:
            raise ProtocolError(f"round {number} of the group ended; this rank is in round {self._round}")
        self.rounds += 1
        proposed, self._proposed = self._proposed, None
        self._round += 1
        if task is None:
            self.failed += 1
            self._refused = proposed
        else:
            self._refused = None
            self._dispatch(task)
        self.kick()
