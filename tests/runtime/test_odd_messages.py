"""A message that makes no sense ends the step on every rank, and its sender is named."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from runtime.ranks import virtual_ranks

import rrfp
from rrfp.errors import PipelineAborted, ProtocolError
from rrfp.hints import create_hint
from rrfp.model.mesh import Mesh
from rrfp.model.tasks import Kind, Mode, StepId, Task
from rrfp.testing.clock import SimulatedTransport, run_virtual
from rrfp.transports.base import Channel, Message, MessageKind

STEP = StepId(0, Mode.TRAIN, 4)
OUTPUT = Task(Kind.F, 2, 0)
STAGES, REPLICAS = Mesh((("pp", 2),)), Mesh((("dp", 2), ("pp", 1)))


def control(kind: MessageKind, task: Task | None = OUTPUT, **body: Any) -> Message:
    return Message(Channel.CONTROL, kind, STEP, task, body=body)


def cause(mesh: Mesh, sender: int, odd: Message, to: int | None = None, **options: Any) -> str:
    """What every rank says is the cause, where ``sender`` sends ``odd`` to another, by default the only other one."""

    class SendsOdd(SimulatedTransport):
        async def start(self) -> None:
            await super().start()
            if self.context.rank == sender:
                await self.send(1 - sender if to is None else to, odd)

    async def run(pipeline: rrfp.Pipeline) -> str:
        with pytest.raises(PipelineAborted) as caught:
            async with pipeline as pipe:
                await pipe.step(microbatches=4)
        return caught.value.origin.cause

    async def main() -> list[str]:
        return await asyncio.gather(*map(run, virtual_ranks(mesh, lambda _: 1.0, SendsOdd, **options)))

    (told,) = set(run_virtual(main()))
    return told.removeprefix("ProtocolError: ")


@pytest.mark.parametrize("seconds", [None, -1.0, 1, float("nan"), float("inf"), "1"])
def test_a_report_of_a_forward_has_a_time(seconds: Any) -> None:
    odd = control(MessageKind.BEGUN, seconds=seconds)
    assert cause(STAGES, 0, odd) == f"rank 0 reported F2@0 for {seconds!r} s, must be a float >= 0"


def test_gradients_are_of_a_virtual_stage_that_exists() -> None:
    odd = Message(Channel.BACKWARD, MessageKind.OUTPUT, STEP, Task(Kind.B, 0, 9), (), {"parts": []})
    assert cause(STAGES, 1, odd) == "B0@9 arrived, but the last virtual stage is 1"


@pytest.mark.parametrize(
    ("odd", "text"),
    [
        (control(MessageKind.CONSUMED, None), "rank 1 sent a consumed message without a task or a step"),
        (
            control(MessageKind.CONSUMED),
            "rank 1 sent F2@0: a rank of another replica, or another member of its group",
        ),
        (control(MessageKind.ORDER), "rank 1 sent a order message that rank 0 cannot use"),
    ],
)
def test_where_a_stage_has_several_ranks_the_one_is_named(odd: Message, text: str) -> None:
    assert cause(REPLICAS, 1, odd) == f"{text} (reported by {REPLICAS.name(1)})"


def test_an_error_of_no_rank_names_none() -> None:
    class Refuses(type(create_hint("bf"))):  # type: ignore[misc]
        def open_step(self, view: rrfp.View) -> None:
            raise ProtocolError("of nobody")

    assert cause(REPLICAS, 1, Message(Channel.CONTROL, MessageKind.PROBE), hint=Refuses) == "of nobody"


@pytest.mark.parametrize(
    ("sender", "body"),
    [
        (0, {"number": 1}),
        (0, {"number": "1", "asker": 0}),
        (0, {"number": 1, "asker": 1}),  # its own question
        (0, {"number": 1, "asker": 7}),
        (0, {"number": 1, "asker": -1}),
        (0, {"number": 1, "asker": 3}),  # which is on the other side
        (2, {"number": 1, "asker": 2}),  # a neighbour it is not
        (0, {"number": 1, "asker": 0, "rank": 2}),  # back to where it comes from
        (0, {"number": 1, "asker": 3, "rank": 4}),
        (0, {"number": 1, "asker": 1, "rank": 9}),
        (0, {"number": 1, "asker": 1, "rank": 0}),  # without a status
    ],
)
def test_a_question_for_the_status_of_a_rank_and_its_answer_come_from_the_side_where_it_is(
    sender: int, body: dict[str, Any]
) -> None:
    """Rank 1 of seven, which has 0 above it, and 3 and 4 below."""
    odd = Message(Channel.CONTROL, MessageKind.STATUS if "rank" in body else MessageKind.STATUS_QUERY, body=body)
    text = cause(Mesh((("pp", 7),)), sender, odd, to=1)
    assert text.startswith((f"rank {sender} asked for", f"rank {sender} sent a status", "a status "))
