"""Failures in groups of ranks: every one is one named error on every rank, soon, and a slow task is none."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from runtime.group_programs import MESH, NAMES, aborted, programs, steps
from runtime.ranks import ThreadedRanks
from runtime.test_watchdog import wait_for_log
from runtime.toys import Hold, Trap

import rrfp
from rrfp.errors import Origin, PipelineAborted
from rrfp.model.mesh import Mesh
from rrfp.model.tasks import Mode, StepId, Task
from rrfp.pipeline.faces import BlockingPipeline
from rrfp.transports.base import Message, MessageKind
from rrfp.transports.inproc import InprocTransport


@pytest.mark.parametrize("guilty", range(4))
def test_a_rank_that_raises_is_named_on_every_rank(guilty: int) -> None:
    def check(task: Task) -> None:
        if task == Task(rrfp.Kind.B, 1, guilty // 2):
            raise Trap("out of luck")

    outcomes = ThreadedRanks(programs(checks={guilty: check}), steps(2), mesh=MESH, hint="1f1b").join()
    for rank, abort in enumerate(aborted(outcomes)):
        assert abort.origin == Origin(guilty // 2, f"B1@{guilty // 2}", "Trap: out of luck", guilty)
        assert isinstance(abort.__cause__, Trap) is (rank == guilty)
        assert str(abort).startswith(f"aborted by stage {guilty // 2} (rank {guilty}), task B1@{guilty // 2}: Trap")


@pytest.mark.parametrize("victim", range(4))
def test_a_rank_that_dies_in_the_middle_of_a_step_is_named_on_every_other(victim: int) -> None:
    """Its transport goes away without a word, as with its process."""

    def check(task: Task) -> None:
        ready.wait(10)
        if len(parts[victim].ran) == 20:
            session = ranks.pipelines[victim]._session
            assert session.thread is not None
            session.thread.loop.call_soon_threadsafe(session._runners[0]._context.transport.abort)

    ready = threading.Event()
    parts = programs(checks={victim: check})
    ranks = ThreadedRanks(parts, steps(50), mesh=MESH)
    ready.set()
    for abort in aborted(ranks.join(), but=victim):
        assert abort.origin == Origin(victim // 2, None, "PeerLostError: its end was aborted", victim)


def test_user_code_that_raises_on_a_follower_ends_every_rank() -> None:
    def body(rank: int, pipe: BlockingPipeline) -> Any:
        steps(1)(rank, pipe)
        if rank == 3:
            raise Trap("the optimizer exploded")
        return steps(1)(rank, pipe)

    outcomes = ThreadedRanks(programs(), body, mesh=MESH).join()
    assert isinstance(outcomes[3].error, Trap)
    for abort in aborted(outcomes, but=3):
        assert abort.origin == Origin(1, None, "Trap: the optimizer exploded", 3)


@pytest.mark.parametrize("coordination", ["leader", "agreement"])
def test_members_that_disagree_on_the_step_are_told_both_values(coordination: str) -> None:
    def body(rank: int, pipe: BlockingPipeline) -> Any:
        return pipe.step(microbatches=3 if rank == 3 else 4)

    for outcome in ThreadedRanks(programs(), body, mesh=MESH, coordination=coordination).join():
        cause = outcome.abort.origin.cause
        assert "3 microbatches" in cause
        assert "4 microbatches" in cause
        assert "(reported by stage " in cause


def test_replicas_of_which_only_some_reduce_are_told_who_does() -> None:
    mesh = Mesh((("dp", 2), ("pp", 2)))

    def body(rank: int, pipe: BlockingPipeline) -> Any:
        return pipe.step(microbatches=2, reduce_gradients=mesh.place_of(rank).replica == 0)

    for outcome in ThreadedRanks(programs(mesh), body, mesh=mesh).join():
        assert outcome.abort.origin.cause == (
            f"ProtocolError: reduce_gradients is True on {mesh.name(0)} and False on {mesh.name(2)} in step 0 "
            "(train, 2 microbatches): must be the same on all"
        )


# A slow rank is no fault.


@pytest.mark.parametrize("slow", [2, 3])
def test_a_slow_task_is_named_and_ends_nothing(slow: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    hold = Hold()
    parts = programs(checks={slow: lambda task: hold(10 * (task.kind != "F"))})
    ranks = ThreadedRanks(parts, lambda rank, pipe: pipe.step(microbatches=1), mesh=MESH, stall_after=0.1)
    try:
        line = wait_for_log(caplog, f"{NAMES[slow]} has been running F0@1 for")
    finally:
        hold.release.set()
    assert "has been idle for" in line
    assert [outcome.error for outcome in ranks.join()] == [None] * 4


# Words that are lost, repeated or out of step.


class Tampering(InprocTransport):
    """Does something to the third message of one kind: ``tampered`` says what and on which rank."""

    kind, how, rank = MessageKind.ORDER, "repeat", 2

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._seen = 0

    async def send(self, peer: int, message: Message) -> None:
        if self.context.rank != self.rank or message.kind is not self.kind:
            await super().send(peer, message)
            return
        self._seen += 1
        if self._seen == 3 and self.how == "lose":
            return
        if self._seen == 3 and self.how == "late":
            assert message.step is not None
            message = replace(message, step=StepId(message.step.number + 2, Mode.TRAIN, 4))
        if self._seen == 3 and self.how == "strange":
            message = replace(message, body={"numbers": ["x"]})
        await super().send(peer, message)
        if self._seen == 3 and self.how == "repeat":
            await super().send(peer, message)


def tampered(kind: MessageKind, how: str, rank: int) -> type[Tampering]:
    return type("Tampered", (Tampering,), {"kind": kind, "how": how, "rank": rank})


@pytest.mark.parametrize(
    ("kind", "how", "by", "found_by", "text"),
    [
        (MessageKind.ORDER, "repeat", 2, 3, "order log repeats an entry: got entry 2 ("),
        (MessageKind.ORDER, "lose", 2, 3, "order log leaves a gap: got entry 3 ("),
        (MessageKind.ORDER, "late", 2, 3, "a message of step 2 (train, 4 microbatches), reached stage 1 in step 0"),
        (MessageKind.ORDER, "strange", 2, 3, "rank 2 sent 'order' with what cannot be read"),
        (MessageKind.READY, "repeat", 3, 2, "member 1 of the group reported"),
        # The leader may not have opened its step yet.
        (MessageKind.READY, "late", 3, 2, "a message of step 2 (train, 4 microbatches), reached stage 1 "),
    ],
)
def test_a_word_that_makes_no_sense_is_named_with_its_sender_on_every_rank(
    kind: MessageKind, how: str, by: int, found_by: int, text: str
) -> None:
    outcomes = ThreadedRanks(programs(), steps(1), mesh=MESH, transport=tampered(kind, how, by)).join()
    for abort in aborted(outcomes):
        assert (abort.origin.stage, abort.origin.rank) == (1, found_by)
        assert abort.origin.cause.startswith("ProtocolError: ")
        assert text in abort.origin.cause
        assert abort.origin.cause.endswith(f" (reported by {NAMES[by]})")


@pytest.mark.parametrize("by", [2, 3])
@pytest.mark.parametrize("how", ["repeat", "late"])
def test_agreement_refuses_words_that_make_no_sense(by: int, how: str) -> None:
    kind = MessageKind.OUTCOME if by == 2 else MessageKind.PROPOSE
    outcomes = ThreadedRanks(
        programs(), steps(1), mesh=MESH, transport=tampered(kind, how, by), coordination="agreement"
    ).join()
    for abort in aborted(outcomes):
        assert abort.origin.rank == 5 - by
        assert abort.origin.cause.startswith("ProtocolError: member ")
        assert abort.origin.cause.endswith(f" (reported by {NAMES[by]})")


def test_a_lost_report_is_told_as_what_the_leader_awaits() -> None:
    """Nothing contradicts it, so the watchdog has to: a message was sent and never comes."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("rrfp").addHandler(handler)
    try:
        ranks = ThreadedRanks(
            programs(),
            lambda rank, pipe: pipe.step(microbatches=4) if rank else _give_up(pipe, lines),
            mesh=MESH,
            transport=tampered(MessageKind.READY, "lose", 3),
            stall_after=0.1,
            limit=4,
        )
        ranks.join()
    finally:
        logging.getLogger("rrfp").removeHandler(handler)
    line = next(line for line in lines if "message(s) are in flight" in line)
    assert f"(not reported by {NAMES[3]})" in line
    assert f"(not ordered by {NAMES[2]}, which leads the group)" in line


def _give_up(pipe: BlockingPipeline, lines: list[str]) -> None:
    """Begin a step, and end the job once somebody has said what is awaited."""
    step = threading.Thread(target=lambda: _quietly(pipe), daemon=True)
    step.start()
    deadline = time.monotonic() + 10
    while not any("message(s) are in flight" in line for line in lines) and time.monotonic() < deadline:
        time.sleep(0.01)
    pipe._session.fail_soon(Trap("enough"))
    step.join(10)


def _quietly(pipe: BlockingPipeline) -> None:
    with pytest.raises(PipelineAborted):
        pipe.step(microbatches=4)
