"""One rank's part in the sum of a tie: what it sends, what it waits for, and messages that make no sense."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from runtime.contexts import context_of
from torch import Tensor, nn

from rrfp import Topology
from rrfp.compute.gradients.layout import encode
from rrfp.compute.gradients.ties import ProcessTies, Tie
from rrfp.errors import ProtocolError
from rrfp.lab.emulated import EmulatedStage
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Mode, StepId
from rrfp.runtime.grad_finalizer import TiedReduction
from rrfp.runtime.lane_executor import LaneExecutor
from rrfp.transports.base import Channel, Message, MessageKind

STEP = StepId(0, Mode.TRAIN, 2)
GRAPH = TaskGraph.chain(3)
TIES = (Tie("it", (0, 1, 2)), Tie("elsewhere", (1, 2)))


class OneRank:
    """The rank of ``stage`` of three, which has a copy of ``it`` whose gradient is (stage + 1, stage + 1)."""

    def __init__(self, stage: int) -> None:
        self.weight = nn.Parameter(torch.zeros(2))
        self.weight.grad = torch.full((2,), stage + 1.0)
        module = nn.Module()
        module.weight = self.weight
        (gradients,) = ProcessTies({"it": self.weight}, [{stage: module}]).ranks
        gradients.agree([TIES[0], *([] if stage else TIES[1:])], 4)
        context = context_of(Topology(stage, 3), GRAPH)
        executor = LaneExecutor(context, EmulatedStage(GRAPH, lambda _: 0.0), lambda _: None)
        self.stage = stage
        self.sent: list[tuple[int, Message]] = []
        self.sending: asyncio.Queue[Message] = asyncio.Queue()
        self.activity = context.activity
        self.reduction = TiedReduction(context, gradients, executor, self._send)
        self.layout = encode(self.weight, "it")
        self.reduction.open()
        context.lane.start()

    async def _send(self, stage: int, message: Message) -> None:
        self.sent.append((stage, message))
        self.sending.put_nowait(message)

    def reduce(self) -> asyncio.Task[None]:
        """All its tasks are done."""
        return asyncio.create_task(self.reduction.reduce(self.stage, STEP, True))

    def piece(self, sender: int, copy: int | None, index: int, value: float, **other: Any) -> Message:
        """A piece of a copy's gradient, which has two of one number each."""
        body = {
            "tie": "it",
            "copy": copy,
            "layout": self.layout,
            "requires_grad": True,
            "checksum": None,
            "piece": index,
            "pieces": 2,
            **other,
        }
        tensors: tuple[Tensor | None, ...] = (torch.tensor([value]),)
        return Message(Channel.BACKWARD, MessageKind.TIE, STEP, tensors=tensors, body=body, sender=sender)


def values(message: Message) -> list[float]:
    return [x for tensor in message.tensors if tensor is not None for x in tensor.tolist()]


async def test_the_first_adds_what_comes_in_any_order_and_sends_the_sum_to_all() -> None:
    rank = OneRank(0)
    rank.reduction.on_message(rank.piece(2, 2, 1, 30.0))  # before its own tasks are done
    reducing = rank.reduce()
    await asyncio.sleep(0)
    assert rank.reduction.awaited == [f"the gradients of tie 'it' from stage {v}" for v in (1, 2)]
    for message in (rank.piece(1, 1, 1, 2.0), rank.piece(2, 2, 0, 30.0), rank.piece(1, 1, 0, 2.0)):
        assert not rank.sent
        rank.reduction.on_message(message)
    await reducing
    assert rank.weight.grad is not None
    assert rank.weight.grad.tolist() == [33.0, 33.0]
    assert [(stage, message.body["copy"], message.body["piece"]) for stage, message in rank.sent] == [
        (1, None, 0),
        (2, None, 0),
        (1, None, 1),
        (2, None, 1),
    ]
    assert all(values(message) == [33.0] for _, message in rank.sent)
    assert not rank.reduction.awaited


async def test_another_sends_its_own_at_once_and_takes_the_sum() -> None:
    rank = OneRank(2)
    reducing = rank.reduce()
    for _ in range(2):
        await rank.sending.get()
    assert [(stage, message.channel, message.body["copy"], values(message)) for stage, message in rank.sent] == [
        (0, Channel.BACKWARD, 2, [3.0])
    ] * 2
    assert rank.reduction.awaited == ["the sum of tie 'it' from stage 0"]
    before = rank.activity.active_at
    rank.reduction.on_message(rank.piece(0, None, 0, 7.0))
    assert rank.activity.active_at > before  # a rank that receives is not idle
    rank.reduction.on_message(rank.piece(0, None, 1, 8.0))
    await reducing
    assert rank.weight.grad is not None
    assert rank.weight.grad.tolist() == [7.0, 8.0]


@pytest.mark.parametrize(
    ("stage", "sender", "copy", "other", "text"),
    [
        (0, 1, 1, {"tie": 5}, "rank 1 sent gradients of a tie that cannot be read"),
        (0, 1, 1, {"layout": None}, "rank 1 sent gradients of a tie that cannot be read"),
        (0, 1, 1, {"checksum": "x"}, "rank 1 sent gradients of a tie that cannot be read"),
        (0, 1, 1, {"tie": "other"}, "rank 1 sent gradients of tie 'other' that are not for rank 0"),
        (0, 1, 1, {"tie": "elsewhere"}, "rank 1 sent gradients of tie 'elsewhere' that are not for rank 0"),
        (0, 1, None, {}, "rank 1 sent gradients of tie 'it' that are not for rank 0"),
        (0, 1, 5, {}, "rank 1 sent gradients of tie 'it' that are not for rank 0"),
        (0, 2, 1, {}, "rank 2 sent gradients of tie 'it' that are another rank's"),
        (2, 1, None, {}, "rank 1 sent gradients of tie 'it' that are another rank's"),
        (2, 1, 1, {}, "rank 1 sent gradients of tie 'it' that are not for rank 2"),
        (0, 1, 1, {"pieces": 0}, "rank 1 sent piece 0 of 0 of tie 'it'"),
        (0, 1, 1, {"piece": -1}, "rank 1 sent piece -1 of 2 of tie 'it'"),
        (0, 1, 1, {"pieces": "x"}, "rank 1 sent piece 0 of x of tie 'it'"),
    ],
)
async def test_what_is_not_meant_for_this_rank_is_refused(
    stage: int, sender: int, copy: int | None, other: Mapping[str, Any], text: str
) -> None:
    rank = OneRank(stage)
    with pytest.raises(ProtocolError) as caught:
        rank.reduction.on_message(rank.piece(sender, copy, 0, 1.0, **other))
    assert str(caught.value) == text


async def test_a_piece_of_another_step_is_refused_but_for_the_next() -> None:
    rank = OneRank(0)
    message = rank.piece(1, 1, 0, 1.0)
    for number, fits in ((0, True), (1, True), (2, False)):
        later = Message(
            message.channel, message.kind, StepId(number, Mode.TRAIN, 2), None, message.tensors, message.body, sender=1
        )
        if fits:
            rank.reduction.on_message(later)
        else:
            with pytest.raises(
                ProtocolError, match=r"sent gradients of tie 'it' for step 2 .*step 0 is next or running"
            ):
                rank.reduction.on_message(later)


async def test_pieces_that_come_twice_or_contradict_each_other_are_refused() -> None:
    rank = OneRank(0)
    rank.reduction.on_message(rank.piece(1, 1, 0, 1.0))
    with pytest.raises(ProtocolError, match="rank 1 sent piece 0 of 2 of tie 'it'"):
        rank.reduction.on_message(rank.piece(1, 1, 0, 1.0))
    with pytest.raises(ProtocolError, match="rank 1 sent pieces of tie 'it' that contradict each other"):
        rank.reduction.on_message(rank.piece(1, 1, 1, 1.0, requires_grad=False))
