"""The public calls of a pipeline: enter, step, leave.

The runtime owns its loop: one thread with one loop serves the ranks of this process, so an optimizer step, data loading
or a checkpoint in the caller's code never delays receiving, heartbeats or an abort. The async API awaits that loop from
the caller's; the blocking API waits for the same future.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Literal, NoReturn, Self, TypeVar, Unpack, get_args

from rrfp.core import timeouts
from rrfp.core.tasks import Mode
from rrfp.errors import ConfigError, PipelineAborted, RrfpError
from rrfp.pipeline.blocking import NO_COPY, BlockingPipeline
from rrfp.pipeline.local_ranks import LocalRanks
from rrfp.pipeline.session import Session
from rrfp.runtime.batching import EvaluateArguments, StepArguments
from rrfp.runtime.result import StepResult
from rrfp.runtime.statistics import RankStatistics

T = TypeVar("T")

#: ``"own"``: a loop in its own thread. ``"caller"``: the loop that enters the pipeline (async only).
LoopChoice = Literal["own", "caller"]


class PipelineHandle:
    """The base of `Pipeline` and `LocalPipeline`: entering, steps, leaving.

    Use it as ``async with pipeline as pipe``, or ``with pipeline.blocking() as pipe``. An exception that leaves the
    block aborts the pipeline on every rank, and so does leaving it during a step. Leaving waits until all ranks have
    done the last step. If another rank failed and no call has raised it, leaving raises `PipelineAborted`.

    Args:
        ranks: the ranks of this process.
        loop: their event loop.
        name: of the loop's thread.
    """

    def __init__(self, ranks: LocalRanks, loop: LoopChoice, name: str) -> None:
        self._session = Session(ranks, name if loop == "own" else None)

    def __reduce__(self) -> NoReturn:
        raise TypeError(NO_COPY)

    def __enter__(self) -> NoReturn:
        raise TypeError("a pipeline is entered with 'async with', or with 'with pipeline.blocking() as pipe'")

    def __exit__(self, *_: object) -> None:
        """Never reached: see ``__enter__``."""

    async def __aenter__(self) -> Self:
        self._session.enter()
        try:
            await self._on_loop(self._session.start())
        except BaseException:
            await asyncio.shield(self._leave())
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._session.is_foreign:
            return
        self._session.check_leaving()
        try:
            if error is None and self._session.is_open:
                await self._run(self._session.settle(), "leaving")
        except BaseException as unsettled:
            error = unsettled
            raise
        finally:
            await self._close(error)

    async def _close(self, error: BaseException | None) -> None:
        try:
            if self._session.has_given_up:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(timeouts.LEAVE_S):
                    closing = asyncio.create_task(self._on_loop(self._session.close(error)))
                    # Should the time be over, its error would go unread, which asyncio logs.
                    closing.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
                    await asyncio.shield(closing)
        finally:
            await asyncio.shield(self._leave())

    async def step(
        self,
        inputs: Sequence[Any] | None = None,
        targets: Sequence[Any] | None = None,
        **arguments: Unpack[StepArguments],
    ) -> StepResult:
        """Train on one batch: adds gradients to ``.grad``; the optimizer's step is the caller's.

        Returns once this rank has done its part and the loss is known. A failure of another rank after that is raised
        by the next call, by a read of the result that waits for that rank, or by leaving.

        Lists are by microbatch; shapes may differ. A rank that passes no list passes ``microbatches``.

        Args:
            inputs: for the first virtual stage: a tensor or named tuple (one argument), a tuple (positional arguments)
                or a dict (keywords) each.
            targets: second argument of ``loss_fn`` on the last virtual stage.
            arguments: ``kwargs``: further keyword arguments: a list for every module of this process, or a dict with a
                list for each stage that has any, ``{stage: [{...}, ...]}``, of which every rank takes its own stage's.
                ``weights``: of the microbatches' losses, such as token counts, 1 by default; needed on the last
                virtual stage. A microbatch of weight 0 is in neither loss nor gradients.
                ``sizes``: the size of each microbatch, in any unit, for hints that read it. ``microbatches``: M, where
                no list is passed. ``grad_scale``: a factor on every gradient, 1.0 by default; the reported loss is
                without it. ``reduce_gradients``: False leaves gradients unreduced over data-parallel replicas, for all
                but the last of several steps that accumulate.

        Returns:
            The result of the step, on every rank. ``seconds``, ``breakdown`` and the peaks need the reports of all
            ranks, and a read waits for them: see `StepResult`. With ``loop="caller"`` the call itself waits.

        Raises:
            ConfigError: if the arguments do not fit; nothing was sent then.
            PipelineAborted: if any rank failed. Gradients are undefined.
            RrfpError: if the pipeline is not entered, was left, or another call runs.
        """
        result = await self._run(self._session.step(Mode.TRAIN, inputs, targets, arguments), "the step")
        return self._session.handed_over(result)

    async def evaluate(
        self,
        inputs: Sequence[Any] | None = None,
        targets: Sequence[Any] | None = None,
        **arguments: Unpack[EvaluateArguments],
    ) -> StepResult:
        """Run a batch forward only, without gradients.

        Modules keep their mode: call ``module.eval()`` before, where that matters.

        Args:
            inputs: as in `step`.
            targets: as in `step`; without them there are no losses.
            arguments: ``kwargs``, ``weights``, ``sizes`` and ``microbatches`` as in `step`. ``return_outputs``: whether
                the result's ``outputs`` hold the outputs of the last virtual stage, detached, on its rank: True, False,
                or None for True where no loss is computed.

        Returns:
            The result, on every rank.

        Raises:
            ConfigError: as `step`.
            PipelineAborted: as `step`.
            RrfpError: as `step`.
        """
        result = await self._run(self._session.step(Mode.FORWARD, inputs, targets, arguments), "the step")
        return self._session.handed_over(result)

    async def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Clip the gradients of the whole model by their norm: over all stages, shards and replicas.

        The counterpart of ``torch.nn.utils.clip_grad_norm_`` for a model in one process. Call it between steps, on
        every rank, with reduced gradients; it needs no process group. Shards must be DTensors: a plain tensor counts as
        the same on all ranks of a group. A factor in the gradients (``grad_scale``) is in their norm too.

        Args:
            max_norm: the largest norm; gradients above it are scaled in place. inf only measures.
            norm_type: p of the p-norm; may be inf.

        Returns:
            The norm before, the same on every rank to the last bit.

        Raises:
            ConfigError: for an impossible argument, arguments that differ between ranks, or a `StageProgram`.
            PipelineAborted: if any rank failed.
            StageError: if a gradient has a layout without a norm.
            RrfpError: as `step`.
        """
        clipping = self._session.clip(max_norm, norm_type)
        return clipping.clip(await self._run(self._session.ranks.share(clipping), "clipping gradients"))

    async def save_trace(
        self, path: str | os.PathLike[str], *, steps: int | None = None, replica: int | Literal["all"] = 0
    ) -> None:
        """Write the newest training steps of all ranks into one trace file, which rank 0 writes.

        Call it between steps, on every rank. `rrfp trace` and `rrfp costs` read the file, and https://ui.perfetto.dev
        draws it: a process for each replica, a thread for each stage. Of a group of ranks (tensor parallelism) its
        leader's trace is in the file. Steps have the numbers of `StepResult.step`; evaluations are not recorded. Each
        rank keeps as many steps as the option ``trace_steps`` says.

        Ranks of one host share a clock. Those of other hosts measure by round trips how far theirs is from rank 0's,
        at the time of this call; the field ``otherData.clocks`` of the file has the ranks of each host, the offset
        that was added to their times, and its largest possible error.

        Args:
            path: of the file, in a folder of rank 0's host that exists; it is replaced as a whole. Other ranks ignore
                theirs.
            steps: only so many of the newest steps; None for all that are kept.
            replica: the data-parallel replica to save, or ``"all"``.

        Raises:
            ConfigError: if an argument does not fit, no step is recorded, arguments differ between ranks, or the file
                cannot be written; the last two on every rank. The pipeline goes on then.
            PipelineAborted: if any rank failed.
            RrfpError: as `step`.
        """
        if reason := await self._run(self._session.save_trace(path, steps, replica), "saving a trace"):
            raise ConfigError(reason)

    def statistics(self) -> tuple[RankStatistics, ...]:
        """Held now, peaks and moved messages of the ranks of this process, for monitoring.

        It only reads counters, never waits, and may be called at any time, also while a step runs or after the pipeline
        was left, and on any thread.

        Returns:
            One entry for each rank of this process; none before the pipeline is entered.
        """
        return self._session.ranks.statistics()

    def blocking(self) -> BlockingPipeline:
        """The same pipeline for ordinary loops: ``with pipeline.blocking() as pipe: pipe.step(...)``.

        Returns:
            The blocking API, to be entered instead of this object.

        Raises:
            ConfigError: if it runs on the caller's loop.
        """
        if self._session.thread_name is None:
            raise ConfigError("loop is 'caller', must be 'own' for the blocking API")
        return BlockingPipeline(self._session)

    async def _run(self, coroutine: Coroutine[Any, Any, T], call: str) -> T:
        try:
            return await self._on_loop(coroutine)
        except PipelineAborted as error:
            aborted = error
        except asyncio.CancelledError:
            self._session.fail_soon(RrfpError(f"{call} was cancelled by its caller"))
            raise
        finally:
            self._session.end()
        raise aborted.with_traceback(None)  # the runtime's frames would bury the caller's

    async def _on_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._session.thread is None:
            return await coroutine
        return await asyncio.wrap_future(self._session.submit(coroutine))

    async def _leave(self) -> None:
        if self._session.thread is None:
            self._session.leave()
        else:  # joining a thread would block the caller's loop
            await asyncio.to_thread(self._session.leave)


def check_loop(loop: LoopChoice) -> None:
    """Refuse a ``loop`` that is none of its values.

    Raises:
        ConfigError: naming them.
    """
    if loop not in get_args(LoopChoice):
        raise ConfigError(f"loop is {loop!r}, must be one of: {', '.join(get_args(LoopChoice))}")
