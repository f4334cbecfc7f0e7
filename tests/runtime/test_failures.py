"""Failures of every kind, with the ranks in threads: each ends with one named error, soon, and nothing is left."""

from __future__ import annotations

import gc
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
from runtime.ranks import SOON_S, ThreadedRanks, step, two_steps
from runtime.toys import Bomb, Hold, Trap, fail_at, stages
from torch import nn

import rrfp
from rrfp import Topology
from rrfp.compute import tracebacks
from rrfp.errors import Origin, PipelineAborted, TransportError
from rrfp.pipeline.faces import BlockingPipeline
from rrfp.runtime.abort import MAX_CAUSE, failure_of
from rrfp.transports.base import Message, MessageKind
from rrfp.transports.inproc import InprocTransport


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
    text = "".join(traceback.format_exception(outcomes[guilty].abort))
    assert "toys.py" in text
    assert "raise error" in text
    cause = outcomes[guilty].abort.__cause__
    assert cause is not None
    first = traceback.extract_tb(cause.__traceback__)[0]
    assert not Path(first.filename).is_relative_to(Path(rrfp.__file__).parent)  # the runtime's frames are cut off


def test_under_torchrun_only_the_rank_at_fault_prints_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setattr(tracebacks, "_logged", WeakSet[Any]())
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # restored afterwards
    modules: list[nn.Module] = [*stages(1), Bomb(fail_at(0, Trap("out of luck")))]
    errors = [outcome.abort for outcome in ThreadedRanks(modules, step).join()]
    printed = []
    for error in errors:
        sys.excepthook(type(error), error, error.__traceback__)
        printed.append(capsys.readouterr().err)
    assert printed[0] == ""
    assert "Trap: out of luck" in printed[1]
    assert [line.split(": ")[0] for line in caplog.messages] == ["stage 0 ends"]


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
        while pipe._session._runners[0].abort.failure is None:
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
        origin = outcomes[stage].abort.origin
        assert origin.stage == 1
        assert origin.cause == "PeerLostError: its program left after 1 step(s), but step 1 was begun elsewhere"
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


class Broken(InprocTransport):
    """Cannot be closed."""

    async def close(self) -> None:
        raise OSError("no such thing")


def test_a_transport_that_cannot_be_closed_hides_no_failure() -> None:
    modules = [*stages(1), Bomb(fail_at(0, Trap("first")))]
    for outcome in ThreadedRanks(modules, step, transport=Broken).join():
        assert outcome.abort.origin.cause == "Trap: first"


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (Unspeakable(), "Unspeakable: (str() failed: RuntimeError)"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (ValueError("\ud800"), "ValueError: \\ud800"),
    ],
)
def test_any_exception_becomes_a_cause_that_travels(error: BaseException, cause: str) -> None:
    failure = failure_of(error, Topology(3, 4))
    assert failure.origin == Origin(3, None, cause)
    assert failure.error().__cause__ is error


def test_a_huge_message_is_cut_so_that_the_abort_still_fits() -> None:
    modules = [*stages(1), Bomb(fail_at(0, Trap("x" * 200_000)))]
    outcomes = ThreadedRanks(modules, step).join()
    assert outcomes[0].abort.origin == outcomes[1].abort.origin
    assert len(outcomes[0].abort.origin.cause) < MAX_CAUSE + 100
