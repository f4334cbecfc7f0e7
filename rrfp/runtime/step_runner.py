"""One rank's steps: each from the plan that its caller has made to the result that the caller gets."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

from rrfp.arbiter.loop import SettlingLoop
from rrfp.compute.program import StageProgram
from rrfp.core.stage_core import StageCore
from rrfp.core.tasks import Mode
from rrfp.core.usage import Peaks
from rrfp.runtime.batching import Plan
from rrfp.runtime.context import RankContext
from rrfp.runtime.core_driver import CoreDriver
from rrfp.runtime.reports import ResourceMeter
from rrfp.runtime.result import StepResult
from rrfp.runtime.step_report import StepReporter
from rrfp.trace.history import TraceHistory
from rrfp.trace.spans import skips


class StepRunner:
    """See the module's docstring.

    Attributes:
        earlier: the most that was held in the steps before the current, or last, one.
    """

    def __init__(
        self,
        context: RankContext,
        core: StageCore,
        program: StageProgram,
        driver: CoreDriver,
        reporter: StepReporter,
        history: TraceHistory,
    ) -> None:
        self.earlier = Peaks()
        self._context = context
        self._core = core
        self._program = program
        self._driver = driver
        self._reporter = reporter
        self._history = history
        self._meter = ResourceMeter(core.limit, core.graph.placement.chunks_of(core.stage), context.transport)

    async def run(self, plan: Plan) -> StepResult:
        """Run one step; its program has the batch. The reports of other ranks may be on their way afterwards."""
        context, step, reporter = self._context, plan.step, self._reporter
        await reporter.settle()
        context.activity.begin_step(step, plan.batch.training_step)
        context.departures.check()
        context.recorder.open()
        self.earlier = Peaks.worst([self.earlier, self._core.peaks])
        await self._share_weights(plan)
        self._driver.open_step(plan, reporter.size_correlation)
        reporter.open(plan, self._read_losses)
        await self._driver.finished.wait()
        # Before this rank reports: the others may then begin the next step, and send its tensors.
        context.mailbox.clear()
        trace = context.recorder.close(step.number, self._core.peaks)
        if plan.skipped:
            trace = replace(trace, skipped=skips(plan.skipped))
        if step.mode is Mode.TRAIN:
            self._history.add(replace(trace, step=plan.batch.training_step))
        losses = await reporter.losses()
        return StepResult.awaiting(
            reporter.report(plan, trace, self._core.peaks, self._meter, self._core.size_correlation),
            step=plan.batch.training_step,
            mode=step.mode,
            microbatches=step.microbatches,
            loss=losses.loss,
            losses=losses.by_microbatch,
            part_losses=losses.by_part,
            trace=trace,
            outputs=self._program.outputs(),
        )

    async def _share_weights(self, plan: Plan) -> None:
        """Sum the weights of losses over replicas; only a rank that computes losses needs the sum."""
        if self._context.topology.replicas == 1 or plan.step.mode is not Mode.TRAIN:
            return
        sharing = self._reporter.share_weights(plan)
        if self._reporter.has_losses:
            await sharing
        else:
            self._context.supervisor.spawn(sharing)

    async def _read_losses(self) -> Mapping[str, Mapping[int, float]]:
        """This rank's losses by part, once they are computed."""
        driver = self._driver
        # Where a device computes them reading waits for it, and must not keep the lane from issuing tasks. In virtual
        # time nothing may come between two tasks that the simulator does not know.
        is_last = self._context.lane.device is not None or isinstance(asyncio.get_running_loop(), SettlingLoop)
        await (driver.finished if is_last else driver.outputs_complete).wait()
        return await driver.executor.run_extra("the losses of the step", self._program.losses_by_part)
