"""The two faces of a pipeline: calls that block, and the same calls to be awaited.

The runtime owns its loop: one thread with one loop serves the ranks of this process, so an optimizer step, data loading
or a checkpoint in the caller's code never delays receiving, heartbeats or an abort. Both faces hand calls to a
`Session` and wait for it.
"""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Literal, NoReturn, ParamSpec, Self, TypeVar, Unpack

from torch.optim import Optimizer

from rrfp import timeouts
from rrfp.compute.tracebacks import from_here
from rrfp.errors import ConfigError, PipelineAborted, RrfpError
from rrfp.laboratory import METHODS, load
from rrfp.model.tasks import Mode
from rrfp.pipeline.local_ranks import LocalRanks
from rrfp.pipeline.loop_thread import LoopChoice
from rrfp.pipeline.lost_rank.survivors import Survivors
from rrfp.pipeline.session import Call, Scaler, Session
from rrfp.runtime.statistics import RankStatistics
from rrfp.runtime.steps.plan import EvaluateArguments, Inputs, StepArguments, Targets
from rrfp.runtime.steps.result import StepResult

if TYPE_CHECKING:
    from rrfp.lab.advice.advice import AdvisedTrace
    from rrfp.lab.advice.report import Advice

P = ParamSpec("P")
T = TypeVar("T")

#: The error of pickle and deepcopy.
NO_COPY = "a pipeline can be neither pickled nor copied, as it holds threads and connections: build one there"


class _Face:
    """What blocking and awaited calls have in common: that which waits for nothing."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._session}>"

    def _repr_html_(self) -> str:
        """In notebooks: the timeline of the newest training step, as far as it ran in this process."""
        html: str = load(METHODS["Pipeline._repr_html_"])(repr(self), self._session.newest_traces())
        return html

    def __reduce__(self) -> NoReturn:
        raise TypeError(NO_COPY)

    @property
    def _survivors(self) -> Survivors | None:
        """For a checkpoint: the ranks that are left, after a loss."""
        return self._session.survivors

    def state_dict(self) -> dict[str, Any]:
        """The state that a run needs to go on in another pipeline; parameters are not in it.

        Call it between steps: before the pipeline is entered, inside, or after it was left, on any thread. A step that
        failed does not count.

        Returns:
            Small plain data that JSON and msgpack carry: ``version`` of this format; ``step``, the number of the next
            training step; ``seed``; ``hint``, ``limit`` and ``strict`` by name; ``deterministic``; ``order``;
            ``virtual_stages``; ``stage`` and ``replica`` of this rank; and ``measured``: durations and sizes on the
            virtual stages of this process, from which hints and a limit on bytes go on.

        Raises:
            RrfpError: during a step or another call.
        """
        return self._session.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state: the next training step has the number ``state["step"]``.

        Call it on every rank with the state of the same step, before the pipeline is entered or between steps. Where
        hint, limit, strict, order, deterministic or the number of virtual stages differ, or on a graph their names, the
        run goes on and a warning names both values and the consequence. Measured values are taken for virtual stages of
        this process that the state has: on a graph by name, else if their number is the same.

        Args:
            state: from `state_dict`, of any rank.

        Raises:
            ConfigError: if it is no such state, its ``seed`` differs, or ``first_step`` was passed and differs from its
                ``step``. Nothing has changed then.
            RrfpError: during a step or another call, or after the pipeline was left.
        """
        self._session.load_state_dict(state)

    def statistics(self) -> tuple[RankStatistics, ...]:
        """Held now, peaks and moved messages of the ranks of this process, for monitoring.

        It only reads counters, never waits, and may be called at any time, also while a step runs or after the pipeline
        was left, and on any thread.

        Returns:
            One entry for each rank of this process; none before the pipeline is entered.
        """
        return self._session.statistics()


class BlockingPipeline(_Face):
    """A pipeline whose calls block: ``pipe`` of ``with pipeline as pipe``, and ``blocking()`` of `rrfp.Pipeline`.

    An exception that leaves the ``with`` block, or that ends a step early, Ctrl-C included, aborts the pipeline on
    every rank.
    """

    def __enter__(self) -> Self:
        session = self._session
        try:
            session.enter()
            try:
                session.submit(session.start()).result()
            except BaseException:
                session.leave()
                raise
        except (RrfpError, KeyboardInterrupt) as error:
            raise from_here(error) from error.__cause__
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        session = self._session
        if not session.turns.has_to_leave():
            return
        try:
            if error is None and session.is_open:
                self._run(session.settle())
        except BaseException as unsettled:
            error = unsettled
            raise
        finally:
            try:
                if not session.has_given_up:
                    _wait(session.submit(session.close(error)), timeouts.LEAVE_S)
            finally:
                session.leave()

    def _run(self, call: Call[T]) -> T:
        """Wait for ``call``; an error that ends the wait, such as Ctrl-C, ends the pipeline."""
        session = self._session
        aborted: PipelineAborted | None = None
        try:
            outcome = session.submit(call.rest).result()
        except PipelineAborted as error:
            aborted = error
        except KeyboardInterrupt as interrupt:
            session.fail_soon(interrupt)
            raise from_here(interrupt) from None
        except BaseException as error:  # after a failure of the step itself this has no effect
            session.fail_soon(error)
            raise
        finally:
            if aborted is None:
                session.turns.end()
        if aborted is None:
            return call.finish(outcome)
        try:
            if call.without is None:
                raise aborted.with_traceback(None)  # the runtime's frames would bury the caller's
            return call.without(aborted)
        except PipelineAborted as failed:
            session.ranks.callbacks.call_failed(failed.origin)
            raise
        finally:
            session.turns.end()

    def step(
        self,
        inputs: Inputs | None = None,
        targets: Targets | None = None,
        **arguments: Unpack[StepArguments],
    ) -> StepResult:
        return self._run(self._session.step(Mode.TRAIN, inputs, targets, arguments))

    def evaluate(
        self,
        inputs: Inputs | None = None,
        targets: Targets | None = None,
        **arguments: Unpack[EvaluateArguments],
    ) -> StepResult:
        return self._run(self._session.step(Mode.FORWARD, inputs, targets, arguments))

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> float:
        return self._run(self._session.clip(max_norm, norm_type, error_if_nonfinite, foreach))

    def scale(self, scaler: Scaler) -> Scaler:
        return self._session.scale(scaler, self.share_overflow)

    def share_overflow(self, own: bool) -> bool:
        """Whether gradients have overflowed on any rank, given whether they have in this process."""
        if self._session.thread_name is None:
            raise RrfpError(
                "the other ranks' gradients cannot be compared while this thread, whose loop serves the pipeline (loop "
                "is 'caller'), is blocked: await pipe.unscale_(optimizer) before scaler.step(optimizer)"
            )
        return self._run(self._session.share_overflow(own))

    def unscale_(self, *optimizers: Optimizer) -> None:
        scaling = self._session.scaling()
        scaling.overflow(*optimizers)
        for optimizer in optimizers:
            scaling.scaler.unscale_(optimizer)

    def save_trace(
        self, path: str | os.PathLike[str], *, steps: int | None = None, replica: int | Literal["all"] = 0
    ) -> None:
        self._run(self._session.save_trace(path, steps, replica))

    def advise(self) -> Advice | None:
        with _advised(self._session) as advised:
            self._run(self._session.save_trace(advised.path, None, "all"))
            return advised.advice()

    def check(self) -> None:
        """Raise `PipelineAborted` if a rank has failed: for waits between steps. May be called on any thread."""
        self._session.check()


def _advised(session: Session) -> AdvisedTrace:
    trace: AdvisedTrace = load(METHODS["Pipeline.advise"])(session.ranks)
    return trace


def _wait(leaving: Future[None], timeout_s: float) -> None:
    """Wait until all resources are freed; a Ctrl-C meanwhile is raised afterwards."""
    deadline = time.monotonic() + timeout_s
    interrupt = None
    while True:
        try:
            with suppress(TimeoutError):
                leaving.result(max(0.0, deadline - time.monotonic()))
            break
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


def _awaited(
    method: Callable[Concatenate[PipelineHandle, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[PipelineHandle, P], Coroutine[Any, Any, T]]:
    """``method``, which refuses a call where nothing can await it, and would otherwise do nothing there.

    Of a pipeline that a coroutine has entered another thread may hand calls to that coroutine's loop.
    """

    @functools.wraps(method)
    def checked(self: PipelineHandle, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            if not self._is_async:
                self._session.turns.check_outside()  # inside a task neither way is right
                call = method.__name__
                raise RrfpError(
                    f"{call}() of the async pipeline was called where no event loop runs. Write 'with pipeline as "
                    f"pipe: pipe.{call}(...)' to block, or, in a coroutine, 'async with pipeline as pipe: await "
                    f"pipe.{call}(...)'"
                ) from None
        return method(self, *args, **kwargs)

    return checked


class PipelineHandle(_Face):
    """The base of `Pipeline` and `LocalPipeline`: entering, steps, leaving.

    ``with pipeline as pipe`` gives calls that block. In a coroutine ``async with pipeline as pipe`` gives the same
    calls to be awaited. An exception that leaves the block aborts the pipeline on every rank, and so does leaving it
    during a step. Leaving waits until all ranks have done the last step. If another rank failed and no call has raised
    it, leaving raises `PipelineAborted`. Leaving twice does nothing more.
    """

    def __init__(self, ranks: LocalRanks, loop: LoopChoice, name: str) -> None:
        super().__init__(Session(ranks, name if loop == "own" else None))
        self._is_async = False

    def __enter__(self) -> BlockingPipeline:
        return self.blocking().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.blocking().__exit__(kind, error, traceback)

    async def __aenter__(self) -> Self:
        session = self._session
        if session.ranks.finishing is not None:
            raise ConfigError(
                "on_lost_rank is 'finish', must be 'abort' with async with: a step is finished on the caller's thread, "
                "which would block its loop"
            )
        try:
            session.enter()
            try:
                await self._on_loop(session.start())
            except BaseException:
                await asyncio.shield(self._free())
                raise
        except RrfpError as error:
            raise from_here(error) from error.__cause__
        self._is_async = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        session = self._session
        if not session.turns.has_to_leave():
            return
        try:
            if error is None and session.is_open:
                await self._run(session.settle())
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
            await asyncio.shield(self._free())

    async def _free(self) -> None:
        if self._session.thread is None:
            self._session.leave()
            await self._session.delivered()
        else:  # joining a thread would block the caller's loop
            await asyncio.to_thread(self._session.leave)

    async def _run(self, call: Call[T]) -> T:
        """Wait for ``call``; cancelling that ends the pipeline."""
        aborted: PipelineAborted | None = None
        try:
            outcome = await self._on_loop(call.rest)
        except PipelineAborted as error:
            aborted = error
        except asyncio.CancelledError:
            self._session.fail_soon(RrfpError(f"{call.name} was cancelled by its caller"))
            raise
        finally:
            self._session.turns.end()
        if aborted is not None:
            raise aborted.with_traceback(None)  # the runtime's frames would bury the caller's
        return call.finish(outcome)

    async def _on_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._session.thread is None:
            return await coroutine
        return await asyncio.wrap_future(self._session.submit(coroutine))

    @_awaited
    async def step(
        self,
        inputs: Inputs | None = None,
        targets: Targets | None = None,
        **arguments: Unpack[StepArguments],
    ) -> StepResult:
        """Train on one batch: adds gradients to ``.grad``; the optimizer's step is the caller's.

        Returns once this rank has done its part and the loss is known. A failure of another rank after that is raised
        by the next call, by a read of the result that waits for that rank, or by leaving.

        Lists are by microbatch; shapes may differ. With ``microbatches`` a tensor in place of a list is a whole batch,
        and so is a dict, tuple or named tuple of tensors: it is cut along dimension 0 into views, the first ones a row
        larger where rows are left over (``torch.tensor_split``). Where targets are cut, microbatches weigh by their
        rows, unless ``weights`` says otherwise: the mean is that of the batch. A rank that passes nothing to cut passes
        ``microbatches`` all the same.

        Args:
            inputs: for the first virtual stage: a tensor or named tuple (one argument), a tuple (positional arguments)
                or a dict (keywords) each. Where the pipeline has a graph, a dict of such lists by part, for the first
                module of each part that is called with any.
            targets: second argument of ``loss_fn`` on the last virtual stage; where several parts of the graph have
                losses, a dict of such lists by part.
            arguments: ``kwargs``, ``weights``, ``sizes``, ``microbatches``, ``visits``, ``grad_scale``,
                ``reduce_gradients``: see `rrfp.runtime.steps.plan.StepArguments`.

        Returns:
            The result of the step, on every rank. ``seconds``, ``breakdown`` and the peaks need the reports of all
            ranks, and a read waits for them: see `StepResult`. With ``loop="caller"`` the call itself waits.

        Raises:
            ConfigError: if the arguments do not fit; nothing was sent then.
            PipelineAborted: if any rank failed. Gradients are undefined.
            RrfpError: if the pipeline is not entered, was left, or another call runs; or inside a module, loss_fn or
                hook that a pipeline of this process calls.
        """
        return await self._run(self._session.step(Mode.TRAIN, inputs, targets, arguments))

    @_awaited
    async def evaluate(
        self,
        inputs: Inputs | None = None,
        targets: Targets | None = None,
        **arguments: Unpack[EvaluateArguments],
    ) -> StepResult:
        """Run a batch forward only, without gradients.

        Modules keep their mode: call ``module.eval()`` before, where that matters.

        Args:
            inputs: as in `step`.
            targets: as in `step`; without them there are no losses, and no loss of a part that the dict lacks.
            arguments: ``kwargs``, ``weights``, ``sizes``, ``microbatches``, ``visits`` as in `step`, and
                ``return_outputs``: see `rrfp.runtime.steps.plan.EvaluateArguments`.

        Returns:
            The result, on every rank.

        Raises:
            ConfigError: as `step`.
            PipelineAborted: as `step`.
            RrfpError: as `step`.
        """
        return await self._run(self._session.step(Mode.FORWARD, inputs, targets, arguments))

    @_awaited
    async def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> float:
        """Clip the gradients of the whole model by their norm: over all stages, shards and replicas.

        The counterpart of ``torch.nn.utils.clip_grad_norm_`` for a model in one process. Call it between steps, on
        every rank, with reduced gradients; it needs no process group. Shards must be DTensors: a plain tensor counts as
        the same on all ranks of a group. A factor in the gradients (``grad_scale``) is in their norm too.

        Args:
            max_norm: the largest norm; gradients above it are scaled in place. inf only measures.
            norm_type: p of the p-norm; may be inf.
            error_if_nonfinite: whether a norm that is inf or nan is an error.
            foreach: of torch's function; changes no result here, and is ignored.

        Returns:
            The norm before, the same on every rank to the last bit.

        Raises:
            ConfigError: for an impossible argument, arguments that differ between ranks, or a `StageProgram`.
            PipelineAborted: if any rank failed.
            RuntimeError: if the norm is inf or nan with ``error_if_nonfinite``: on every rank, which can go on. No
                gradient has changed.
            StageError: if a gradient has a layout without a norm.
            RrfpError: as `step`.
        """
        return await self._run(self._session.clip(max_norm, norm_type, error_if_nonfinite, foreach))

    def scale(self, scaler: Scaler) -> Scaler:
        """Scale the loss of training steps by a `torch.amp.GradScaler`, for float16.

        Every rank has a scaler of its own, with the same arguments. Losses are reported without the scale.
        ``scaler.unscale_``, ``scaler.step`` and ``scaler.update`` are called as in one process, by every rank. The
        first of these calls after an update waits for all ranks: if a gradient of any of them is inf or nan, every
        optimizer skips its step on every rank, and all scales become smaller in the same update.

        A disabled scaler does nothing. `state_dict` does not contain the scaler's state.

        Args:
            scaler: from now on also checks the other ranks' gradients; replaces an earlier scaler.

        Returns:
            The same object.

        Raises:
            ConfigError: if it is no GradScaler, or belongs to another pipeline that was entered and not left.
            RrfpError: during a step or another call, or after the pipeline was left.
        """
        return self._session.scale(scaler, BlockingPipeline(self._session).share_overflow)

    @_awaited
    async def unscale_(self, *optimizers: Optimizer) -> None:
        """As ``scaler.unscale_`` of the scaler that `scale` got, for each of ``optimizers``, without blocking the loop.

        Afterwards ``scaler.step`` and ``scaler.update`` wait for no rank. With ``loop="caller"`` this is the only way
        to compare gradients with other processes.

        Args:
            optimizers: of this rank; none where it has none.

        Raises:
            ConfigError: if there is no scaler.
            PipelineAborted: if any rank failed.
            RrfpError: as `step`.
        """
        scaling = self._session.scaling()
        if (own := scaling.question(*optimizers)) is not None:
            scaling.answer(await self._run(self._session.share_overflow(own)))
        for optimizer in optimizers:
            scaling.scaler.unscale_(optimizer)

    @_awaited
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
        await self._run(self._session.save_trace(path, steps, replica))

    @_awaited
    async def advise(self) -> Advice | None:
        """What slows the newest training steps down, and what a setting would change: `rrfp advise` without a file.

        Call it between steps, on every rank, after at least seven steps: the first two of those that are kept are left
        out. Rank 0 replays the others on the simulator's engine, which takes seconds; the pipeline serves its peers
        meanwhile. The page "My step is slow" explains the figures.

        Returns:
            On rank 0 the advice: ``print`` shows it as the command does, ``to_json()`` has its figures, ``causes`` and
            ``settings`` those of each line. None on other ranks.

        Raises:
            ConfigError: on every rank as `save_trace`; on rank 0 also if the steps predict nothing: too few, tasks that
                shared cores, or stages in one process, whose tasks run one at a time on a CPU.
            PipelineAborted: if any rank failed.
            RrfpError: as `step`.
        """
        with _advised(self._session) as advised:
            await self._run(self._session.save_trace(advised.path, None, "all"))
            return await asyncio.to_thread(advised.advice)

    def blocking(self) -> BlockingPipeline:
        """What ``with pipeline as pipe`` enters, as an object of its own.

        Returns:
            The blocking API, to be entered instead of this object.

        Raises:
            ConfigError: if it runs on the caller's loop.
        """
        if self._session.thread_name is None:
            raise ConfigError("loop is 'caller', must be 'own' for the blocking API")
        return BlockingPipeline(self._session)
