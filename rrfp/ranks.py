"""The ranks that this process runs, usually one, driven together on the runtime's loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn

from rrfp.batching import Plan, plan_step
from rrfp.compute.base import StageProgram
from rrfp.compute.nondeterminism import warn_of_torch
from rrfp.core.tasks import Mode
from rrfp.errors import PipelineAborted
from rrfp.options import PipelineOptions
from rrfp.result import StepResult
from rrfp.stage import StageRunner
from rrfp.trace.spans import merge

T = TypeVar("T")

#: Makes the runners; called on the loop that they will run on.
Build = Callable[[], Awaitable[Sequence[StageRunner]]]


class Ranks:
    """The runners of one process. All methods but `announce` and `plan` are called on the runtime's loop.

    Args:
        programs: what each rank computes.
        options: how.
        build: makes the runners.
        modules: those that the programs run.
        replicas: copies of the pipeline in the job.
    """

    def __init__(
        self,
        programs: Sequence[StageProgram],
        options: PipelineOptions,
        build: Build,
        modules: Sequence[nn.Module] = (),
        replicas: int = 1,
    ) -> None:
        self._programs = programs
        self._options = options
        self._build = build
        self._modules = modules
        self._replicas = replicas
        self._runners: Sequence[StageRunner] = ()

    def announce(self) -> None:
        """Say what cannot be kept of what was promised. Called on the caller's thread, whose settings apply."""
        if self._options.deterministic:
            warn_of_torch(self._modules)

    def plan(self, number: int, mode: Mode, **arguments: Any) -> Plan:
        """Check a step's arguments and hand them to the programs. Called on the caller's thread, whose modes apply.

        Args:
            number: the step's.
            mode: training or forward only.
            arguments: those of `rrfp.batching.plan_step`.

        Raises:
            ConfigError: if they do not fit; nothing has happened then.
        """
        is_shared = mode is Mode.TRAIN and self._replicas > 1
        plan = plan_step(number, mode, self._options.reduction, **arguments, is_shared=is_shared)
        for program in self._programs:
            program.open(plan.step, plan.batch)
        return plan

    async def start(self) -> None:
        """Connect and begin to serve; when one rank cannot, free what the others have."""
        self._runners = await self._build()
        starting = [asyncio.create_task(runner.start()) for runner in self._runners]
        try:
            await asyncio.gather(*starting)
        except BaseException as error:
            for start in starting:
                start.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            self.fail(error)
            await self.close(quiet=True)
            raise

    async def step(self, plan: Plan) -> StepResult:
        """Run one planned step on all ranks of this process."""
        results = await _all(runner.step(plan, self._options.reduction) for runner in self._runners)
        outputs = {m: output for result in results for m, output in result.outputs.items()}
        return replace(results[0], trace=merge(result.trace for result in results), outputs=outputs)

    def fail(self, error: BaseException) -> None:
        """End the pipeline because of ``error`` in the caller's code; no news to a rank that has failed already."""
        for runner in self._runners:
            runner.fail(error)

    async def close(self, *, quiet: bool = False) -> None:
        """Leave: in order, or after a failure once the peers were told.

        Args:
            quiet: the caller knows of the failure.

        Raises:
            PipelineAborted: if the pipeline failed and no call has told the caller, unless ``quiet``.
        """
        with suppress(PipelineAborted) if quiet else nullcontext():
            await _all(runner.close() for runner in self._runners)


async def _all(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """Wait for all, also when one fails; then raise the failure of a rank that knows the cause, if there is one."""
    outcomes = await asyncio.gather(*awaitables, return_exceptions=True)
    failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if failures:
        raise next((failure for failure in failures if failure.__cause__ is not None), failures[0])
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
