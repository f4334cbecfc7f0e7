"""One use of a pipeline: entering, the calls of its caller, one at a time, and leaving.

The caller's thread begins a call, the ranks run it on their loop, and the two faces of a pipeline wait for the outcome
in between: `PipelineHandle` awaits it, `BlockingPipeline` blocks.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Literal, NoReturn, TypeVar

from torch.amp import GradScaler

from rrfp.arbiter.loop import LoopTime
from rrfp.compute.caller_context import out_of_reach
from rrfp.compute.determinism import check_torch, device_types
from rrfp.compute.tracebacks import print_no_traceback
from rrfp.errors import ConfigError, PipelineAborted, RrfpError
from rrfp.log import get_logger
from rrfp.model.tasks import Mode
from rrfp.pipeline.local_ranks import LocalRanks, ProcessMonitor, all_ended, together
from rrfp.pipeline.loop_thread import AwaitedFutures, LoopThread, begin
from rrfp.pipeline.loss_scaling import LossScaling, Share, bind
from rrfp.pipeline.lost_rank.finishing import Finishing
from rrfp.pipeline.lost_rank.roll_call import Decision
from rrfp.pipeline.lost_rank.survivors import Survivors
from rrfp.pipeline.method import DispatchMethod
from rrfp.pipeline.state import PipelineState
from rrfp.pipeline.turns import Turns
from rrfp.runtime import records
from rrfp.runtime.grad_clipping import Clipping, any_overflow
from rrfp.runtime.stage_runner import StageRunner
from rrfp.runtime.statistics import RankStatistics
from rrfp.runtime.steps.plan import EvaluateArguments, Inputs, StepArguments, StepPlan, StepRequest, Targets
from rrfp.runtime.steps.result import StepResult
from rrfp.runtime.trace_saver import TraceRequest
from rrfp.trace.spans import StepTrace

T = TypeVar("T")
Scaler = TypeVar("Scaler", bound=GradScaler)

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A call that has begun: its arguments are checked, and no other call begins before it ends."""

    name: str
    #: To run on the runtime's loop.
    rest: Coroutine[Any, Any, Any]
    #: Makes the caller's result of the outcome, on the caller's thread, once the call has ended.
    finish: Callable[[Any], T]
    #: The same among the ranks that are left, after a loss; None where the call ends with the pipeline.
    without: Callable[[PipelineAborted], T] | None = None


class Session:
    """One use of a pipeline. Its methods are called on the caller's thread, but those behind "On the loop"."""

    def __init__(self, ranks: LocalRanks, thread_name: str | None) -> None:
        self.ranks = ranks
        #: Of the thread with the loop; None: the ranks run on the caller's loop.
        self.thread_name = thread_name
        self.thread: LoopThread | None = None
        self.turns = Turns(ranks)
        #: Steps begun, counting evaluations, the same on all ranks; and the number of the next training step.
        self._next_step, self._training_step = 0, ranks.options.first_step
        #: Training steps completed on this rank, counting those before ``first_step``.
        self._completed = ranks.options.first_step
        #: The failure that all calls raise once the loop has not run for too long.
        self._given_up: PipelineAborted | None = None
        self._awaited = AwaitedFutures()
        #: The scale on the loss of training steps, if any.
        self._scaling: LossScaling | None = None
        #: A state that was loaded before the start.
        self._loaded: PipelineState | None = None
        self._has_warned = False
        self._runners: Sequence[StageRunner] = ()
        self._monitor: ProcessMonitor | None = None
        self._time = LoopTime()

    def __str__(self) -> str:
        """Stages, method and state, for the user. On any thread; takes no lock, so it never waits."""
        state = self.turns.state
        if state == "new":
            text = "not entered"
        elif self.has_given_up or any(runner.abort.failure is not None for runner in self._runners):
            text = "aborted"
        elif state == "closed":
            text = "left"
        else:
            text = "running" if state == "open" else f"running ({state})"
        return f"{self.ranks}, {text}"

    @property
    def is_open(self) -> bool:
        """Whether it takes a call now."""
        return self.turns.state == "open" and not self.has_given_up

    @property
    def has_given_up(self) -> bool:
        """Whether the loop did not run for too long, so that waiting would never return."""
        return self._given_up is not None

    # Entering and leaving.

    def enter(self) -> None:
        """Enter the pipeline; an RrfpError the second time. `start` follows on the loop."""
        self.turns.enter(on_this_loop=self.thread_name is None)
        try:
            self._read_ties()
            if self.thread_name is not None:
                self.thread = LoopThread(self.thread_name)
        except BaseException:
            self.leave()
            raise

    def _read_ties(self) -> None:
        """Read the tied parameters, which ranks compare, and check torch's settings if the pipeline is deterministic.

        On the caller's thread, whose settings apply.
        """
        ranks = self.ranks
        try:
            for tied in ranks.ties:
                tied.read()
            if ranks.options.deterministic:
                kinds = {device.kind for device in ranks.devices if device.kind == "cuda"}
                check_torch(device_types(ranks.holder.modules.values()) | kinds)
        except Exception as error:
            if ranks.failed_starts is not None:
                ranks.failed_starts.report_now(error)
            raise

    def settle(self) -> Call[None]:
        """Begin to leave in order: wait for the reports of the last step."""
        with self.turns.begin("leaving", counts=False):
            return Call("leaving", self._settle(), lambda _: None)

    def leave(self) -> None:
        """Stop the loop's thread and wait for the callbacks; on the caller's loop `delivered` awaits them."""
        self.turns.close()
        if self.thread is not None:
            self.thread.close()
        # The loop does not end, or it ended with the work undone.
        self._awaited.fail(RrfpError("the pipeline was left before this was complete"))
        self.ranks.callbacks.end()
        if self.thread_name is not None:
            self.ranks.callbacks.wait()

    # Steps.

    def step(
        self,
        mode: Mode,
        inputs: Inputs | None,
        targets: Targets | None,
        arguments: StepArguments | EvaluateArguments,
    ) -> Call[StepResult]:
        """Begin a step."""
        with self.turns.begin("in a step"):
            self._check_more()
            return self._begin(self._plan(StepRequest.of(mode, inputs, targets, arguments)))

    def run(self, plan: StepPlan) -> Call[StepResult]:
        """Begin the step of a plan that was made elsewhere."""
        with self.turns.begin("in a step"):
            return self._begin(plan)

    def _begin(self, plan: StepPlan) -> Call[StepResult]:
        self._open(plan)
        self._next_step += 1
        self._training_step += plan.step.mode is Mode.TRAIN
        self.ranks.callbacks.step_begun(plan)
        # Without the option no frame of its code is in the traceback of a step that fails.
        without = None if (finishing := self.ranks.finishing) is None else partial(self._finish, finishing)
        return Call("the step", self._step(plan), self._handed_over, without)

    def _plan(self, request: StepRequest) -> StepPlan:
        scaling = self._scaling if request.mode is Mode.TRAIN else None
        scale = None if scaling is None else scaling.factor()
        return self.ranks.planner.plan(request, self._next_step, self._training_step, self.turns.refused, scale)

    def _open(self, plan: StepPlan) -> None:
        """Pass the batch to the programs. On the caller's thread, whose modes apply."""
        ranks, is_training = self.ranks, plan.step.mode is Mode.TRAIN
        if ranks.finishing is not None:
            ranks.finishing.open(plan, ranks.holder.modules)  # before anything changes
        for tied in ranks.ties if is_training else ():
            tied.check()
        if not self._has_warned and (modes := out_of_reach()) is not None:
            logger.warning("around step or evaluate, %s (docs/how-to/training-loop.md)", modes)
            self._has_warned = True
        for program, topology in zip(ranks.programs, ranks.topologies, strict=True):
            program.open(plan.step, plan.batch_of(topology.stage))
        for tied in ranks.ties if is_training else ():
            tied.open(plan.reduce_gradients)
        for reducer in ranks.reducers if is_training else ():
            reducer.open(plan.reduce_gradients)
        for runner in self._runners:  # last, because all of the above may have issued work
            runner.fence()

    def _handed_over(self, result: StepResult) -> StepResult:
        """``result``, whose tensors the calling thread may use from now on."""
        self._completed = self._training_step
        for runner in self._runners:
            runner.hand_over(result.outputs)
        if (pending := result.pending) is not None:
            self._awaited.add(pending.outcome)
        self.ranks.callbacks.step_ended(result)
        return result

    # Calls between steps.

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool, foreach: bool | None) -> Call[float]:
        """Begin to clip gradients; errors as in `Clipping`."""
        with self.turns.begin("clipping gradients"):
            clipping = Clipping(self.ranks.holder, max_norm, norm_type, error_if_nonfinite, foreach)
            return self._gathering(
                "clipping gradients", "clip_grad_norm_", clipping.share, clipping.empty_share, clipping.clip
            )

    def _gathering(
        self,
        name: str,
        call: str,
        own: Callable[[], bytes],
        empty: Callable[[], bytes],
        finish: Callable[[Sequence[bytes]], T],
    ) -> Call[T]:
        """A call for which all ranks give bytes; after a loss, of each stage the first rank that is left."""

        def without(finishing: Finishing, error: PipelineAborted) -> T:
            survivors = finishing.decide(error, self._wait)
            return finish(survivors.gather(own() if survivors.is_giver else empty()))

        finishing = self.ranks.finishing
        rest = self._gather(call, own(), empty())
        return Call(name, rest, finish, None if finishing is None else partial(without, finishing))

    def scale(self, scaler: Scaler, share: Share) -> Scaler:
        """Scale the loss of training steps from now on; errors as in `rrfp.Pipeline.scale`.

        ``share`` is for a process that has not all stages.
        """
        with self.turns.between("scale", closed="call scale() of a new one"):
            self._scaling = bind(scaler, self.ranks.holder.modules, self.turns, None if self.ranks.are_all else share)
        return scaler

    def scaling(self) -> LossScaling:
        """The scale on the loss; a ConfigError if there is none."""
        if self._scaling is None:
            raise ConfigError("unscale_ needs a scaler: call scale() with a torch.amp.GradScaler before")
        return self._scaling

    def share_overflow(self, own: bool) -> Call[bool]:
        """Begin to compare whether gradients have overflowed, given whether they have in this process."""
        with self.turns.begin("comparing overflows"):
            packed, none = records.pack(own), records.pack(False)
            return self._gathering("comparing overflows", "GradScaler.step", lambda: packed, lambda: none, any_overflow)

    def save_trace(self, path: str | os.PathLike[str], steps: int | None, replica: int | Literal["all"]) -> Call[None]:
        """Begin to save a trace; a ConfigError if an argument does not fit, or no step is recorded."""
        with self.turns.begin("saving a trace", counts=False):
            self._check_more()
            here = self.ranks.topologies[0]
            job = DispatchMethod(self.ranks.options).traced(here, is_serial=self.ranks.is_serial)
            request = TraceRequest.checked(path, steps, replica, here.replicas, job)
            if not self.ranks.options.trace_steps:
                raise ConfigError("trace_steps is 0, must be at least 1 for save_trace")
            if None in self.newest_traces():
                raise ConfigError("no training step is recorded: save_trace goes after a step")
        without = None if (finishing := self.ranks.finishing) is None else partial(self._refuse_trace, finishing)
        return Call("saving a trace", self._save_trace(request), _written, without)

    def newest_traces(self) -> list[StepTrace | None]:
        """Of each rank here, the newest trace that it keeps."""
        return [runner.saver.newest for runner in self._runners]

    def state_dict(self) -> dict[str, Any]:
        """The state after the last completed training step."""
        with self.turns.between("state_dict"):
            plain: dict[str, Any] = records.to_plain(self._state(self._completed))
        return plain

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``; a ConfigError if it does not fit."""
        with self.turns.between("load_state_dict", closed="load the state into a new one"):
            read = PipelineState.read(state)
            own = self._state(read.step)
            is_first = self._loaded is None and not self._runners
            chosen = self.ranks.options.first_step if is_first else 0
            if chosen not in (0, read.step):
                raise ConfigError(f"first_step is {chosen}, must be {read.step}, the state's step, or not passed")
            read.check_fits(own)
            self._loaded = read.for_pipeline(own)
            self._restore()
            self._training_step = self._completed = read.step

    def _state(self, step: int) -> PipelineState:
        measured = [each for runner in self._runners for each in runner.core.measured()]
        if not self._runners and self._loaded is not None:
            measured = list(self._loaded.measured)
        ranks = self.ranks
        names = () if ranks.model is None else ranks.model.tasks.names
        return PipelineState.of(ranks.options, ranks.topologies[0], ranks.virtual_stages, step, measured, names)

    def _restore(self) -> None:
        if self._loaded is not None:
            for runner in self._runners:
                runner.core.restore(self._loaded.measured)

    # What any thread may ask, at any time.

    def check(self) -> None:
        """Raise `PipelineAborted` if a rank has failed."""
        for runner in self._runners:
            runner.abort.check()

    def statistics(self) -> tuple[RankStatistics, ...]:
        """The statistics of each rank; none before the start."""
        return tuple(runner.statistics() for runner in self._runners)

    # After the loss of a rank, where the others finish the step. On the caller's thread.

    @property
    def survivors(self) -> Survivors | None:
        """The ranks that are left, if one was lost and they go on."""
        return None if self.ranks.finishing is None else self.ranks.finishing.survivors

    def _check_more(self) -> None:
        if self.ranks.finishing is not None:
            self.ranks.finishing.check_open()

    def _finish(self, finishing: Finishing, error: PipelineAborted) -> StepResult:
        """End the step that ``error`` has ended without the lost rank."""
        make = self.ranks.whole
        assert make is not None

        def run_again(decision: Decision, plan: StepPlan) -> StepResult:
            whole = Session(make(decision, plan.batch.training_step), f"{self.thread_name}-finish")
            # Torch waits minutes for a rank that dies while it makes the smaller groups.
            losing = self.submit(finishing.loss())
            losing.add_done_callback(whole.end_by)
            try:
                return whole.run_alone(plan)
            finally:
                losing.cancel()

        result = finishing.finish(error, self.ranks.holder.modules, self._wait, self._retire, run_again)
        self._completed = self._training_step
        self.ranks.callbacks.step_ended(result)
        return result

    def _refuse_trace(self, finishing: Finishing, error: PipelineAborted) -> NoReturn:
        finishing.refuse(error, self._wait, self._completed, "A trace is of all ranks")

    def run_alone(self, plan: StepPlan) -> StepResult:
        """Enter, run one step, and leave."""
        error: BaseException | None = None
        self.enter()
        try:
            self._wait(self.start())
        except BaseException:
            self.leave()
            raise
        try:
            call = self.run(plan)
            result = call.finish(self._wait(call.rest))
            self._wait(self._settle())
            return result
        except BaseException as failed:
            error = failed
            raise
        finally:
            try:
                self._wait(self.close(error))
            finally:
                self.leave()

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.submit(coroutine).result()

    async def _retire(self) -> None:
        """Free this rank, and wait for its lane, which may still write gradients; an RrfpError if that takes long."""
        with suppress(PipelineAborted):
            await self._close_ranks()
        timeout_s = self.ranks.options.connect_timeout
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(runner.idle() for runner in self._runners))
        except TimeoutError:
            raise RrfpError(
                f"the step cannot be run again: a task still runs after {timeout_s:g} s (connect_timeout), or the lane "
                "does not say that it is over (Lane.is_over)"
            ) from None

    # The way to the loop.

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run ``coroutine`` on the runtime's own loop; cancelling its future cancels it.

        The future fails if the loop does not run any more.
        """
        assert self.thread is not None
        outcome: Future[T] = Future()
        if self._given_up is not None:  # no one would complete it
            coroutine.close()
            outcome.set_exception(self._given_up)
            return outcome
        loop = self.thread.loop
        loop.call_soon_threadsafe(begin, loop, coroutine, outcome)
        self._awaited.add(outcome)
        return outcome

    def fail_soon(self, error: BaseException) -> None:
        """End the pipeline because the caller gave up waiting. Runs before all that is submitted later."""
        if self.thread is None:
            self._fail(error)
        else:
            self.thread.loop.call_soon_threadsafe(self._fail, error)

    def end_by(self, losing: Future[PipelineAborted]) -> None:
        """End by the error that ``losing`` has, once it is done."""
        with suppress(RrfpError, CancelledError):  # nobody looks for it any more
            self._give_up(losing.result())

    def _give_up(self, error: PipelineAborted) -> None:
        """The loop has not run for too long: pass ``error`` to all callers that wait. On the thread that noticed."""
        self._given_up = error
        self._awaited.fail(error)
        self.ranks.callbacks.aborted(error.origin)
        with suppress(RuntimeError):  # the loop ran again, and was closed meanwhile
            self.fail_soon(error)  # should it ever run again: the other ranks must not end a step that failed here

    # On the loop.

    async def start(self) -> None:
        """Connect and begin to serve; when one rank cannot, free the others' resources."""
        ranks = self.ranks
        give_up = None if self.thread is None else self._give_up
        self._time = LoopTime.of_running_loop()
        for reducer in ranks.reducers:
            reducer.start()
        connecting = self._connect()
        try:
            await (connecting if ranks.failed_starts is None else ranks.failed_starts.unless_reported(connecting))
            if not self._time.is_virtual:  # which is not related to the time of other threads and processes
                self._monitor = ProcessMonitor(
                    self._runners, ranks.options, str(ranks), give_up, ranks.callbacks.stalled
                )
                self._monitor.start()
        except BaseException as error:
            self._fail(error)
            with suppress(PipelineAborted):
                await self._close_ranks()
            if isinstance(error, PipelineAborted):
                await self._wait_for_failed_process(error)
            raise
        ranks.callbacks.begin(self._training_step)

    async def _connect(self) -> None:
        first_step = self.ranks.options.first_step if self._loaded is None else self._loaded.step
        self._runners = await self.ranks.make_runners(first_step)
        self.turns.start(self._runners)
        self._restore()
        await together(runner.start() for runner in self._runners)

    async def _step(self, plan: StepPlan) -> StepResult:
        """Run one step on all ranks of this process; the reports of all ranks may still be on their way."""
        first, *others = await all_ended(runner.step(plan) for runner in self._runners)
        finishing = self.ranks.finishing
        if finishing is not None:
            finishing.keep(first)
        # On the caller's own loop a read of the result must not block: nothing else would run. And where a step can be
        # run again, no caller goes on before all ranks have done it.
        if self.thread is None or finishing is not None:
            await self._settle()
        return first.joined(others) if others else first

    async def _settle(self) -> None:
        """Wait for the reports of the last step."""
        await all_ended(runner.settle() for runner in self._runners)

    async def _gather(self, call: str, own: bytes, empty: bytes) -> list[bytes]:
        """All-gather ``own`` of each process between two steps; further ranks of a process give ``empty``."""
        first, *others = self._runners
        return (await all_ended([first.gather(call, own), *(runner.gather(call, empty) for runner in others)]))[0]

    async def _save_trace(self, request: TraceRequest) -> str:
        return (await all_ended(runner.save_trace(request) for runner in self._runners))[0]

    async def close(self, error: BaseException | None) -> None:
        """Leave, because of ``error`` or in order.

        Raises `PipelineAborted` if the pipeline failed, no call has raised it, and there is no ``error``.
        """
        if error is not None:
            self._fail(error)
        # All of this caller's steps are done: the others save without it.
        goes_on = self.ranks.finishing is not None and await self.ranks.finishing.leave()
        try:
            await self._close_ranks()
        except PipelineAborted as unraised:
            if error is None and not goes_on:
                await self._wait_for_failed_process(unraised)
                raise
        if isinstance(error, PipelineAborted):
            await self._wait_for_failed_process(error)

    async def delivered(self) -> None:
        """Wait until all callbacks have had their events, without blocking the loop unless its time is virtual."""
        if self._time.is_virtual:
            self.ranks.callbacks.wait()
        else:
            await self.ranks.callbacks.delivered()

    def _fail(self, error: BaseException) -> None:
        """End the pipeline because of ``error`` in the caller's code; no effect on a rank that has failed already."""
        for runner in self._runners:
            runner.fail(error)

    async def _close_ranks(self) -> None:
        """Leave in order, or after a failure once the peers have the abort; raises what no call has raised."""
        # A rank whose own call had returned when another one failed has raised nothing; the caller knows all the same.
        is_known = any((failure := runner.abort.failure) is not None and failure.was_raised for runner in self._runners)
        try:
            with suppress(PipelineAborted) if is_known else nullcontext():
                await all_ended(runner.close() for runner in self._runners)
        finally:
            if self._monitor is not None:
                await self._monitor.close()
            for reducer in self.ranks.reducers:
                reducer.close()

    async def _wait_for_failed_process(self, error: PipelineAborted) -> None:
        """Under torchrun, wait until the process in which ``error`` began has ended; `FAILED_PROCESS_GRACE_S` at most.

        torchrun takes the first process that it finds ended as the root cause, and ends the others. A rank that is not
        at fault says so in one line: its traceback would only bury that of the rank at fault.
        """
        if "TORCHELASTIC_RUN_ID" in os.environ:
            logged = await asyncio.gather(*(runner.wait_for_failed_process(error.origin) for runner in self._runners))
            if all(logged):
                print_no_traceback(error)


def _written(reason: Any) -> None:
    """The end of a call that saves a trace, given the cause if nothing was written."""
    if reason:
        raise ConfigError(reason)
