"""One rank's part of one step in its group: the order log, reports, and the waits for other members.

Every rank runs exactly the leader's log, so collectives inside tasks run in the same order on the whole group.
The leader appends to the log what it enqueues; followers report to it what has arrived and what tasks left behind. What
contradicts the state (a report that the leader does not await, an entry out of order) raises `ProtocolError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rrfp.core import events as ev
from rrfp.core.ready_set import Readiness, ReadySet
from rrfp.core.task_state import TaskStates
from rrfp.core.usage import WaitCause
from rrfp.errors import ConfigError, ProtocolError
from rrfp.memory.rules import MemoryRule
from rrfp.model.tasks import StepId, Task


@dataclass(frozen=True, slots=True)
class GroupMembership:
    """This rank's part in its group of ranks that run the same tasks in the same order."""

    #: This rank's index in the group; 0 leads.
    member: int = 0
    #: Ranks in the group; 1 means that nothing has to be agreed on.
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.member < self.size:
            raise ConfigError(f"group: member is {self.member}, must be 0..{self.size - 1}")

    @property
    def num_followers(self) -> int:
        """Ranks that report to this one: none unless it leads."""
        return self.size - 1 if self.member == 0 else 0

    @property
    def follows(self) -> bool:
        """Whether this rank takes its order from the leader."""
        return self.member > 0


class OrderLog:
    """The log as one rank has it in one step."""

    def __init__(self) -> None:
        self._entries: list[Task] = []
        self._known: set[Task] = set()
        self._next = 0

    def append(self, task: Task) -> int:
        """Leader: the next entry is ``task``, which it enqueues; returns its sequence number."""
        self._entries.append(task)
        self._next = len(self._entries)
        return self._next - 1

    def receive(self, sequence: int, task: Task) -> None:
        """Follower: entry ``sequence`` is ``task``. A gap, a repeated entry or a repeated task is a ProtocolError."""
        expected = len(self._entries)
        if sequence != expected:
            what = "repeats an entry" if sequence < expected else "leaves a gap"
            raise ProtocolError(f"order log {what}: got entry {sequence} ({task}), expected {expected}")
        if task in self._known:
            raise ProtocolError(f"order log repeats a task: entry {sequence} is {task}, which it has already")
        self._known.add(task)
        self._entries.append(task)

    def head(self) -> Task | None:
        """Follower: the next entry to run, or None."""
        return self._entries[self._next] if self._next < len(self._entries) else None

    def pending(self) -> Sequence[Task]:
        """Follower: the entries that were not enqueued, in order."""
        return self._entries[self._next :]

    def advance(self, task: Task) -> None:
        """Follower: ``task`` was enqueued, which must be the head of the log."""
        if task != self.head():
            raise ProtocolError(f"{task} was enqueued, but the leader's log says {self.head()}")
        self._next += 1


class GroupStep:
    """The log, reports and waits of one rank in one step."""

    def __init__(
        self,
        group: GroupMembership,
        step_id: StepId,
        stage: int,
        *,
        states: TaskStates,
        readiness: Readiness,
        ready: ReadySet,
        admission: MemoryRule,
    ) -> None:
        self.log = OrderLog()
        self._group = group
        self._step_id = step_id
        self._stage = stage
        self._states = states
        self._readiness = readiness
        self._ready = ready
        self._admission = admission
        #: Leader: what each follower has reported: a task as ready, and the bytes after it.
        self._reported: set[tuple[int, Task]] = set()
        self._bytes_reported: set[tuple[int, Task]] = set()

    # Events.

    def enqueue(self, task: Task) -> tuple[ev.Instruction, ...]:
        """This rank enqueued ``task``: a follower obeys the log, a leader appends to it. Returns () outside a group."""
        if self._group.size == 1:
            return ()
        if self._group.follows:
            self.log.advance(task)
            return ()
        return (ev.Order(self.log.append(task), task),)

    def order(self, event: ev.Ordered) -> tuple[()]:
        """Follower: the leader's log has one entry more. What depends on it may be ordered next."""
        task = event.task
        if not self._group.follows:
            raise ProtocolError(f"{task} was ordered on stage {self._stage}, whose group this rank leads")
        if not self._states.knows(task):
            raise ProtocolError(f"{task} was ordered, which does not run on stage {self._stage} in {self._step_id}")
        self.log.receive(event.sequence, task)
        self._readiness.enqueue(self._states.of(task), task.microbatch)
        return ()

    def report(self, event: ev.ReadyReported) -> tuple[()]:
        """Leader: a follower has what a task needs from other stages."""
        member, task = event.member, event.task
        if not 0 < member <= self._group.num_followers or not self._readiness.expects_reports(task):
            raise self._unawaited(f"member {member} of the group reports {task} as ready")
        if (member, task) in self._reported:
            raise ProtocolError(f"member {member} of the group reported {task} as ready twice")
        self._reported.add((member, task))
        self._readiness.report(task)
        return ()

    def hold(self, event: ev.HeldReported) -> tuple[()]:
        """Leader: a follower has completed a task."""
        member, task = event.member, event.task
        is_follower = 0 < member <= self._group.num_followers
        if not is_follower or not self._states.knows(task) or not self._readiness.is_available(task):
            raise self._unawaited(f"member {member} of the group reports bytes of {task}")
        if (member, task) in self._bytes_reported:
            raise ProtocolError(f"member {member} of the group reported the bytes of {task} twice")
        self._bytes_reported.add((member, task))
        chunk = self._states.of(task).chunk
        self._admission.complete_elsewhere(member, chunk, task, event.held, event.output)
        return ()

    def _unawaited(self, report: str) -> ProtocolError:
        return ProtocolError(f"{report}, which stage {self._stage} does not await")

    # What may run, and what is awaited.

    def next(self) -> Task | None:
        """Follower: the log's next entry, once its inputs are here and a slot is free."""
        head = self.log.head()
        return head if head is not None and head in self._ready else None

    def wait_cause(self) -> WaitCause | None:
        """Why there is nothing to run, as far as the group is the reason; None where the rank's own state does.

        For the leader: ORDER while a report is all that some task lacks. A follower waits for the inputs or the slot of
        its log's next entry; at the end of the log, for another entry, if some task here has its inputs.
        """
        if not self._group.follows:
            return WaitCause.ORDER if self._readiness.num_unreported else None
        head = self.log.head()
        if head is None:
            return WaitCause.ORDER if self._ready.holds_any else WaitCause.INPUT
        return WaitCause.MEMORY if self._readiness.has_inputs(head) else WaitCause.INPUT

    def unreported(self, task: Task) -> tuple[int, ...]:
        """Leader: the followers without whose report ``task`` cannot run."""
        if not self._group.num_followers or not self._readiness.expects_reports(task):
            return ()
        return tuple(member for member in range(1, self._group.size) if (member, task) not in self._reported)

    def unmeasured(self, task: Task) -> tuple[int, ...]:
        """Leader: the followers that have not reported the bytes after ``task``."""
        return tuple(member for member in range(1, self._group.size) if (member, task) not in self._bytes_reported)

    def pending(self) -> Sequence[Task]:
        """Follower: what was ordered and not enqueued, in order."""
        return self.log.pending() if self._group.follows else ()
