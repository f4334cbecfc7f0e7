"""One rank's part of one step in its group: orders, reports, and the waits for other members.

The leader appends to the log what it enqueues; followers report to it what has arrived and what tasks left behind. What
contradicts the state (a report that the leader does not await, an entry out of order) raises `ProtocolError`.
"""

from __future__ import annotations

from collections.abc import Sequence

from rrfp.core import events as ev
from rrfp.core.admission import Admission
from rrfp.core.order_log import Group, OrderLog
from rrfp.core.readiness import Readiness
from rrfp.core.ready_set import ReadySet
from rrfp.core.task_state import TaskStates
from rrfp.core.tasks import StepId, Task
from rrfp.core.usage import WaitCause
from rrfp.errors import ProtocolError


class GroupStep:
    """See the module's docstring. Owned by `rrfp.core.step.Step`."""

    def __init__(
        self,
        group: Group,
        step_id: StepId,
        stage: int,
        *,
        states: TaskStates,
        readiness: Readiness,
        ready: ReadySet,
        admission: Admission,
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
        if self._group.follows:
            self.log.advance(task)
            return ()
        return (ev.Order(self.log.append(task), task),) if self._group.size > 1 else ()

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
        self._admission.complete_elsewhere(member, self._states.of(task).chunk, event)
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
