"""Failures of every kind, with the ranks in threads: each ends with one named error, soon, and nothing is left."""

from __future__ import annotations

import gc
import threading
import time
import traceback
from typing import Any

import pytest
import torch
from runtime.ranks import ThreadedRanks
from runtime.toys import Bomb, Hold, data, fail_at, stages
from torch import Tensor, nn

import rrfp
from rrfp.blocking import BlockingPipeline
from rrfp.control.failure import MAX_CAUSE, failure_of
from rrfp.errors import Origin, PipelineAborted, TransportError
from rrfp.transports.base import Message, MessageKind
from rrfp.transports.inproc import InprocTransport

BATCH = data(4)

#: The most that may pass between a failure and the error on every rank, in seconds.
SOON_S = 2.0


def step(stage: int, pipe: BlockingPipeline) -> Any:
    return pipe.step(BATCH.inputs, BATCH.targets)


def two_steps(stage: int, pipe: BlockingPipeline) -> Any:
    step(stage, pipe)
    return step(stage, pipe)


class Trap(Exception):
    """What the tests raise."""


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("kind", ["F", "B"])
def test_a_stage_that_raises_is_named_on_every_rank(count: int, kind: str) -> None:
    guilty = count // 2
    modules: list[nn.Module] = stages(count)
    check = fail_at(1, Trap("out of luck"))
    modules[guilty] = Bomb(check) if kind == "F" else Bomb(on_backward=check)
    outcomes = ThreadedRanks(modules, two_steps, hint="1f1b").join()
    for stage, outcome in enumerate(outcomes):
        origin = outcome.abort.origin
        assert (origin.stage, origin.cause) == (guilty, "Trap: out of luck")
        assert origin.task == f"{kind}1@{guilty}"
        assert isinstance(outcome.abort.__cause__, Trap) is (stage == guilty)
    assert max(outcome.ended for outcome in outcomes) - min(outcome.ended for outcome in outcomes) < SOON_S
    told = "".join(traceback.format_exception(outcomes[guilty].abort))
    assert "toys.py" in told
    assert "raise error" in told


def test_a_loss_function_that_raises_is_named() -> None:
    def bad_loss(output: Tensor, target: Tensor) -> Tensor:
        raise Trap("no loss today")

    for outcome in ThreadedRanks(stages(3), step, loss_fn=bad_loss).join():
        assert outcome.abort.origin == Origin(2, "F0@2", "Trap: no loss today")


class Choosing(rrfp.Hint):
    """A hint that goes wrong at its fifth choice, in the way that `how` says."""

    def __init__(self, how: str) -> None:
        self.how, self.choices = how, 0

    def choose(self, ready: rrfp.ReadySet, view: rrfp.View) -> rrfp.Task | None:
        self.choices += 1
        if view.stage == 1 and self.choices == 5:
            if self.how == "raises":
                raise Trap("cannot choose")
            if self.how == "exits":
                raise SystemExit(3)
            return None if self.how == "none" else rrfp.Task(rrfp.Kind.F, 77, 1)
        return next(iter(ready))


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("raises", "Trap: cannot choose"),
        ("exits", "SystemExit: 3"),
        ("none", "HintError: hint Choosing chose None on stage 1; ready are: ReadySet("),
        ("nonsense", "HintError: hint Choosing chose F77@1 on stage 1; ready are: ReadySet("),
    ],
)
def test_a_hint_that_goes_wrong_is_named(how: str, cause: str) -> None:
    for outcome in ThreadedRanks(stages(3), two_steps, hint=Choosing(how)).join():
        assert outcome.abort.origin.stage == 1
        assert outcome.abort.origin.cause.startswith(cause)


class Observing(Choosing):
    """Its `observe` raises at every event from the first completed task on, the abort included."""

    def observe(self, event: Any) -> None:
        if self.choices:
            raise Trap("seen too much")


class Opening(Choosing):
    def open_step(self, view: rrfp.View) -> None:
        if view.stage == 2:
            raise Trap("closed today")


@pytest.mark.parametrize(("hint", "cause"), [(Observing(""), "seen too much"), (Opening(""), "closed today")])
def test_a_hint_that_raises_while_it_listens_is_named_on_every_rank(hint: rrfp.Hint, cause: str) -> None:
    for outcome in ThreadedRanks(stages(3), step, hint=hint).join():
        assert outcome.abort.origin.cause == f"Trap: {cause}"


class BadProgram(rrfp.StageProgram):
    """Raises in the method that is named."""

    def __init__(self, method: str) -> None:
        self._method = method

    def _enter(self, method: str) -> None:
        if method == self._method:
            raise Trap(method)

    def open(self, step: Any, batch: rrfp.Batch) -> None:
        self._enter("open")

    def forward(self, task: rrfp.Task, inputs: tuple[rrfp.Payload, ...]) -> rrfp.Payload:
        return rrfp.Payload.pack(torch.ones(1))

    def backward(self, task: rrfp.Task, grads: tuple[rrfp.Payload, ...]) -> tuple[rrfp.Payload, ...]:
        return (rrfp.Payload((torch.ones(1),)),) if task.virtual_stage else ()

    def finish(self, virtual_stage: int) -> None:
        self._enter("finish")

    def held_bytes(self, microbatch: int, virtual_stage: int) -> int:
        self._enter("held_bytes")
        return 0

    def losses(self) -> Any:
        self._enter("losses")
        return {}


@pytest.mark.parametrize("method", ["held_bytes", "finish", "losses"])
def test_a_stage_program_that_raises_anywhere_is_named(method: str) -> None:
    modules: Any = [BadProgram(""), BadProgram(method)]
    for outcome in ThreadedRanks(modules, step).join():
        assert outcome.abort.origin.cause == f"Trap: {method}"


def test_user_code_that_raises_between_steps_ends_every_rank() -> None:
    def body(stage: int, pipe: BlockingPipeline) -> Any:
        step(stage, pipe)
        if stage == 1:
            raise Trap("the optimizer exploded")
        return step(stage, pipe)

    outcomes = ThreadedRanks(stages(4), body).join()
    assert isinstance(outcomes[1].error, Trap)
    for stage in (0, 2, 3):
        assert outcomes[stage].abort.origin == Origin(1, None, "Trap: the optimizer exploded")


def test_a_failure_that_no_step_told_is_told_when_the_block_is_left() -> None:
    failed = threading.Event()

    def body(stage: int, pipe: BlockingPipeline) -> Any:
        step(stage, pipe)
        if stage == 0:
            raise Trap("late")
        while pipe._session.ranks._runners[0]._failure is None:
            failed.wait(0.01)

    outcomes = ThreadedRanks(stages(2), body).join()
    assert outcomes[1].abort.origin == Origin(0, None, "Trap: late")


def test_a_caught_abort_is_not_told_again() -> None:
    def body(stage: int, pipe: BlockingPipeline) -> Any:
        with pytest.raises(PipelineAborted):
            two_steps(stage, pipe)
        with pytest.raises(PipelineAborted) as again:
            step(stage, pipe)
        return again.value.origin

    modules = [*stages(1), Bomb(fail_at(2, Trap("x")))]
    assert [outcome.value for outcome in ThreadedRanks(modules, body).join()] == [Origin(1, "F2@1", "Trap: x")] * 2


def test_a_rank_that_leaves_early_is_named_at_once() -> None:
    def body(stage: int, pipe: BlockingPipeline) -> Any:
        return step(stage, pipe) if stage == 1 else two_steps(stage, pipe)

    outcomes = ThreadedRanks(stages(3), body).join()
    assert outcomes[1].error is None
    for stage in (0, 2):
        assert outcomes[stage].abort.origin.cause == (
            "ProtocolError: stage 1 closed its pipeline after 1 step(s), but step 1 was begun here"
        )
    assert max(outcome.ended for outcome in outcomes) - outcomes[1].ended < SOON_S


@pytest.mark.parametrize("disagreement", ["M", "mode"])
def test_ranks_that_disagree_on_the_step_are_told_both_values(disagreement: str) -> None:
    def body(stage: int, pipe: BlockingPipeline) -> Any:
        if stage != 1:
            return step(stage, pipe)
        return pipe.step(microbatches=3) if disagreement == "M" else pipe.evaluate(microbatches=4)

    for outcome in ThreadedRanks(stages(3), body).join():
        cause = outcome.abort.origin.cause
        assert cause.startswith("ProtocolError: stages disagree on the step")
        for told in ("4 microbatches", "3 microbatches") if disagreement == "M" else ("train", "forward"):
            assert told in cause


def test_an_abort_waits_for_no_lane() -> None:
    hold, failed = Hold(), []

    def body(stage: int, pipe: BlockingPipeline) -> Any:
        if stage != 2:
            return step(stage, pipe)
        hold.begun.wait()
        failed.append(time.monotonic())
        raise Trap("enough")

    outcomes = ThreadedRanks([*stages(1), Bomb(hold), *stages(1)], body).join()
    hold.release.set()
    assert max(outcome.ended for outcome in outcomes) - failed[0] < SOON_S
    for stage in (0, 1):
        assert outcomes[stage].abort.origin == Origin(2, None, "Trap: enough")


def test_an_abort_does_not_wait_for_losses_that_a_lane_is_reading() -> None:
    hold = Hold()

    class Reading(BadProgram):
        def losses(self) -> Any:
            hold(0)
            return {}

    class Failing(BadProgram):
        def losses(self) -> Any:
            hold.begun.wait(10)
            raise Trap("unreadable")

    modules: Any = [Failing(""), Reading("")]
    outcomes = ThreadedRanks(modules, step).join(5.0)
    hold.release.set()
    assert [outcome.abort.origin.cause for outcome in outcomes] == ["Trap: unreadable"] * 2


def test_two_failures_at_once_are_one_error_on_each_rank() -> None:
    barrier = threading.Barrier(2)
    errors = [Trap("one"), Trap("two")]

    def body(stage: int, pipe: BlockingPipeline) -> Any:
        step(stage, pipe)
        barrier.wait(10)
        raise errors[stage]

    for stage, outcome in enumerate(ThreadedRanks(stages(2), body).join()):
        assert outcome.error is errors[stage]


def test_a_task_that_fails_after_the_abort_is_no_second_error(caplog: pytest.LogCaptureFixture) -> None:
    """asyncio complains in the log about exceptions that nobody asked for."""
    hold = Hold()

    def late(number: int) -> None:
        hold(number)
        raise Trap("late")

    def body(stage: int, pipe: BlockingPipeline) -> Any:
        if stage == 0:
            return step(stage, pipe)
        hold.begun.wait()
        raise Trap("first")

    def both(stage: int, pipe: BlockingPipeline) -> Any:
        try:
            return body(stage, pipe)
        finally:
            if stage == 0:
                hold.release.set()

    outcomes = ThreadedRanks([Bomb(late), *stages(1)], both).join()
    assert outcomes[0].abort.origin.cause == "Trap: first"
    gc.collect()
    assert not caplog.records


class Mute(InprocTransport):
    """Cannot send an abort."""

    async def send(self, peer: int, message: Message) -> None:
        if message.kind is MessageKind.ABORT:
            raise TransportError("cannot say it")
        await super().send(peer, message)


def test_peers_that_cannot_be_told_see_the_rank_as_lost() -> None:
    modules = [*stages(1), Bomb(fail_at(0, Trap("quiet")))]
    outcomes = ThreadedRanks(modules, step, transport=Mute).join()
    assert outcomes[1].abort.origin.cause == "Trap: quiet"
    assert outcomes[0].abort.origin == Origin(1, None, "PeerLostError: its end was aborted")


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (Unspeakable(), "Unspeakable: (its text cannot be had: RuntimeError)"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (ValueError("\ud800"), "ValueError: \\ud800"),
    ],
)
def test_any_exception_becomes_a_cause_that_travels(error: BaseException, cause: str) -> None:
    failure = failure_of(error, 3)
    assert failure.origin == Origin(3, None, cause)
    assert failure.error().__cause__ is error


def test_a_huge_message_is_cut_so_that_the_abort_still_fits() -> None:
    modules = [*stages(1), Bomb(fail_at(0, Trap("x" * 200_000)))]
    outcomes = ThreadedRanks(modules, step).join()
    assert outcomes[0].abort.origin == outcomes[1].abort.origin
    assert len(outcomes[0].abort.origin.cause) < MAX_CAUSE + 100
