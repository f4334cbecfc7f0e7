"""One use of a pipeline: its ranks, their loop, and its steps. Both the async and the blocking API drive a session."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from rrfp.errors import ConfigError, PipelineAborted, RrfpError, misspelt
from rrfp.model.tasks import Mode
from rrfp.pipeline.between_steps import BetweenSteps
from rrfp.pipeline.calls import AwaitedFutures, Call, CallGate
from rrfp.pipeline.local_ranks import LocalRanks
from rrfp.pipeline.loop_thread import LoopThread
from rrfp.pipeline.state import PipelineState
from rrfp.runtime.batching import EvaluateArguments, Inputs, StepArguments, Targets
from rrfp.runtime.result import StepResult

T = TypeVar("T")

#: The arguments of a step beside inputs and targets.
_ARGUMENTS: Mapping[Mode, frozenset[str]] = {
    Mode.TRAIN: StepArguments.__required_keys__ | StepArguments.__optional_keys__,
    Mode.FORWARD: EvaluateArguments.__required_keys__ | EvaluateArguments.__optional_keys__,
}


class Session:
    """See the module's docstring. Methods are called on the caller's thread, unless their docstring names another.

    ``thread_name`` is that of the thread with the loop; None: the ranks run on the caller's loop.
    """

    def __init__(self, ranks: LocalRanks, thread_name: str | None) -> None:
        self.ranks = ranks
        self.thread: LoopThread | None = None
        self.thread_name = thread_name
        self.gate = CallGate(ranks.check_outside)
        self.between_steps = BetweenSteps(ranks, self.gate)
        #: Steps begun, counting evaluations, the same on all ranks; and the number of the next training step.
        self._next_step, self._training_step = 0, ranks.first_step
        #: Training steps completed on this rank, counting those before ``first_step``.
        self._completed = ranks.first_step
        #: The failure that all calls raise once the loop has not run for too long.
        self._given_up: PipelineAborted | None = None
        self._awaited = AwaitedFutures()

    def __str__(self) -> str:
        """Stages, method and state, for the user. On any thread; takes no lock, so it never waits."""
        state = self.gate.state
        if state == "new":
            text = "not entered"
        elif self.has_given_up or self.ranks.has_failed:
            text = "aborted"
        elif state == "closed":
            text = "left"
        else:
            text = "running" if state == "open" else f"running ({state})"
        return f"{self.ranks}, {text}"

    def enter(self) -> None:
        """Enter the pipeline; an RrfpError the second time."""
        self.gate.open(asyncio.get_running_loop() if self.thread_name is None else None)
        try:
            self.ranks.announce()
            if self.thread_name is not None:
                self.thread = LoopThread(self.thread_name)
        except BaseException:
            self.leave()
            raise

    def step(
        self,
        mode: Mode,
        inputs: Inputs | None,
        targets: Targets | None,
        arguments: StepArguments | EvaluateArguments,
    ) -> Call[StepResult]:
        """Begin a step."""
        with self.gate.beginning("in a step"):
            for name in arguments:
                if name not in _ARGUMENTS[mode]:
                    allowed = ", ".join(["inputs", "targets", *sorted(_ARGUMENTS[mode])])
                    wrong = misspelt(name, ["inputs", "targets", *_ARGUMENTS[mode]])
                    raise ConfigError(f"unknown argument {wrong}, must be one of: {allowed}")
            scale = self.between_steps.loss_scale() if mode is Mode.TRAIN else None
            batch = {"inputs": inputs, "targets": targets, "loss_scale": scale, **arguments}
            plan = self.ranks.plan(self._next_step, self._training_step, mode, refused=self.gate.refused, **batch)
            self._next_step += 1
            self._training_step += mode is Mode.TRAIN
            self.ranks.delivery.step_begun(plan)
            # On the caller's own loop a read of the result must not block: nothing else would run there.
            rest = self.ranks.whole_step(plan) if self.thread is None else self.ranks.step(plan)
        return Call("the step", rest, self._handed_over)

    def _handed_over(self, result: StepResult) -> StepResult:
        """``result``, whose tensors the calling thread may use from now on."""
        self._completed = self._training_step
        self.ranks.hand_over(result)
        if (pending := result.pending) is not None:
            self._awaited.add(pending.outcome)
        self.ranks.delivery.step_ended(result)
        return result

    @property
    def is_open(self) -> bool:
        """Whether it takes a call now."""
        return self.gate.state == "open" and not self.has_given_up

    def settle(self) -> Call[None]:
        """Begin to leave in order: wait for the reports of the last step."""
        with self.gate.beginning("leaving", counts=False):
            return Call("leaving", self.ranks.settle(), lambda _: None)

    def state_dict(self) -> dict[str, Any]:
        """The state after the last completed training step."""
        with self.gate.between("state_dict"):
            return self.ranks.state(self._completed).plain()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``."""
        with self.gate.between("load_state_dict", closed="load the state into a new one"):
            read = PipelineState.read(state)
            self.ranks.load(read)
            self._training_step = self._completed = read.step

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run ``coroutine`` on the runtime's own loop; cancelling its future cancels it.

        The future fails if the loop does not run any more.
        """
        assert self.thread is not None
        if (given_up := self._given_up) is not None:  # no one would complete it
            coroutine.close()
            outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
            outcome.set_exception(given_up)
            return outcome
        outcome = self.thread.submit(coroutine)
        self._awaited.add(outcome)
        return outcome

    async def start(self) -> None:
        """Start the ranks. On the runtime's loop."""
        await self.ranks.start(None if self.thread is None else self._give_up)
        self.ranks.delivery.begin(self._training_step)

    @property
    def has_given_up(self) -> bool:
        """Whether the loop did not run for too long, so that waiting would never return."""
        return self._given_up is not None

    def _give_up(self, error: PipelineAborted) -> None:
        """The loop has not run for too long: pass ``error`` to all callers that wait. On the thread that noticed."""
        self._given_up = error
        self._awaited.fail(error)
        self.ranks.delivery.aborted(error.origin)
        with suppress(RuntimeError):  # the loop ran again, and was closed meanwhile
            self.fail_soon(error)  # should it ever run again: the other ranks must not end a step that failed here

    def fail_soon(self, error: BaseException) -> None:
        """End the pipeline because the caller gave up waiting. Runs before all that is submitted later."""
        if self.thread is None:
            self.ranks.fail(error)
        else:
            self.thread.loop.call_soon_threadsafe(self.ranks.fail, error)

    def check_leaving(self) -> None:
        """Raise an RrfpError on another loop, or inside a task, that says where to leave."""
        self.gate.check_loop()
        if self.ranks.computes_here():
            raise RrfpError(
                "the pipeline cannot be left from inside a task of its own step, such as loss_fn or a module: leave it "
                "where step() was called"
            )

    async def close(self, error: BaseException | None) -> None:
        """Leave, because of ``error`` or in order. On the runtime's loop.

        Raises `PipelineAborted` if the pipeline failed, no call has raised it, and there is no ``error``.
        """
        if error is not None:
            self.ranks.fail(error)
        try:
            await self.ranks.close(quiet=error is not None)
        except PipelineAborted as unraised:
            await self.ranks.wait_for_failed_process(unraised)
            raise
        if isinstance(error, PipelineAborted):
            await self.ranks.wait_for_failed_process(error)

    def leave(self) -> None:
        """Stop the loop's thread and wait for the callbacks; on the caller's loop that is awaited apart."""
        self.gate.close()
        if self.thread is not None:
            self.thread.close()
        # The loop does not end, or it ended with the work undone.
        self._awaited.fail(RrfpError("the pipeline was left before this was complete"))
        self.ranks.delivery.end()
        if self.thread_name is not None:
            self.ranks.delivery.wait()
