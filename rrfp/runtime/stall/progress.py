"""How a rank is doing, for its status."""

from __future__ import annotations

from rrfp.core.waiting import describe, past_of, waiting
from rrfp.model.tasks import Task
from rrfp.runtime.context import RankContext
from rrfp.runtime.core_driver import CoreDriver
from rrfp.runtime.stall.status import RankStatus, StepStatus


class StallProgress:
    """Asks the parts of one rank what they do and wait for."""

    def __init__(self, context: RankContext, driver: CoreDriver) -> None:
        self._topology = context.topology
        self._now = context.lane.now
        self._activity = context.activity
        self._recorder = context.recorder
        self._core = driver.core
        self._driver = driver
        self._executor = driver.executor
        self._messenger = driver.messenger

    def idle_seconds(self) -> float:
        """For how long nothing has happened while all ranks are waited for; 0 otherwise, and while the lane is busy."""
        activity = self._activity
        is_awaited = activity.gathering or (activity.step is not None and not activity.has_returned)
        if not is_awaited or self.running():
            return 0.0
        return self._now() - activity.active_at

    def running(self) -> str | None:
        """The task, or extra call, that the rank is busy with."""
        task = self.running_task()
        return self._executor.extra if task is None else self._core.graph.text_of(task)

    def running_task(self) -> Task | None:
        return self._core.in_flight[0] if self._core.in_flight else None

    def running_seconds(self) -> float:
        """For how long it has been busy with that; 0 where it is idle."""
        return 0.0 if self.running() is None else self._now() - self._executor.running_since

    def status(self) -> RankStatus:
        activity, running, now = self._activity, self.running(), self._now()
        is_in_step = activity.step is not None
        dispute = self._driver.dispute() if is_in_step else None
        wait = self._recorder.wait if running is None and is_in_step else None
        awaits = describe(self._core, self._topology, dispute=dispute) if is_in_step else []
        return RankStatus(
            stage=self._core.stage,
            step=None if activity.step is None else activity.step.number,
            steps_ended=activity.steps_ended,
            running=running,
            running_s=self.running_seconds(),
            can_run=not running and is_in_step and dispute is None and self._core.decide() is not None,
            completed=self._executor.completed,
            sent=self._messenger.sent,
            received=self._messenger.received,
            awaits=(*awaits, *self._driver.gradients.awaited()) if is_in_step else (),
            gathering=activity.gathering,
            gatherings_ended=activity.gatherings_ended,
            name=self._topology.name,
            has_returned=activity.has_returned,
            waits_for="" if wait is None else str(wait[0]),
            waits_s=0.0 if wait is None else now - wait[1],
            training_step=activity.training_step,
            current=self._step_status(),
            at=now,
            story="" if activity.step is None else self._story(),
        )

    def _step_status(self) -> StepStatus | None:
        core, step = self._core, self._core.step
        if step is None or step.id != self._activity.step:
            return None
        return StepStatus(
            mode=str(step.id.mode),
            enqueued=step.num_enqueued,
            tasks=step.num_tasks,
            ready=len(core.ready),
            holding=core.holding,
            slots=core.view.slots,
            limit_bytes=core.limit.bytes,
        )

    def _story(self) -> str:
        """What happened to the first task that the rank waits for."""
        dispute = self._driver.dispute()
        tasks = [entry.task for entry in waiting(self._core, 1)] if dispute is None else [dispute[0]]
        return past_of(self._core, self._topology, tasks[0]) if tasks else ""
