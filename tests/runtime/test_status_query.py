"""The question for the status of all ranks: each answers along the control tree, and no rank waits for another."""

from __future__ import annotations

import asyncio
from itertools import permutations
from typing import Any

import pytest
import torch
from runtime.contexts import context_of
from runtime.toys import data, loss_fn, stages

import rrfp
from rrfp import Topology, timeouts
from rrfp.errors import ProtocolError
from rrfp.model.graph import TaskGraph
from rrfp.runtime import records
from rrfp.runtime.control_tree import neighbours, towards
from rrfp.runtime.stall.peer_monitor import PeerMonitor
from rrfp.runtime.stall.status import RankStatus
from rrfp.runtime.stall.status_query import MOST_ASKED, StatusQuery
from rrfp.testing.clock import run_virtual
from rrfp.transports.base import Channel, Message, MessageKind

STATUS = RankStatus(0, None, 0, None, 0.0, False, 0, 0, 0)
PACKED = torch.frombuffer(bytearray(records.pack(STATUS)), dtype=torch.uint8)


def test_the_way_through_the_tree_leads_from_every_rank_to_every_other() -> None:
    for world in range(1, 18):
        for rank, other in permutations(range(world), 2):
            way = [rank]
            while way[-1] != other:
                step = towards(way[-1], other)
                assert step in neighbours(way[-1], world)
                assert step not in way
                way.append(step)


async def test_every_rank_sees_all_others() -> None:
    batch = data(1)
    async with rrfp.local(stages(6), loss_fn=loss_fn, loop="caller") as pipe:
        for number in range(2):
            await pipe.step(batch.inputs, batch.targets)
            for asker, runner in enumerate(pipe._session._runners):
                job = await runner.health.query.ask()
                assert job.asker == asker
                for rank, answer in enumerate(job.answers):
                    assert (answer.rank, answer.stage, answer.name, answer.absent) == (rank, rank, f"stage {rank}", "")
                    assert answer.status is not None
                    assert (answer.status.stage, answer.status.steps_ended) == (rank, number + 1)
                    assert answer.status.training_step == number


class Silent:
    """Rank 1 of seven (0 above it, 3 and 4 below), whose neighbours never answer; ``posted`` is what it sends them."""

    def __init__(self) -> None:
        self.posted: list[tuple[int, Message]] = []
        context = context_of(Topology(1, 7), TaskGraph.chain(7))
        self.monitor = PeerMonitor(context, {}, self._post)
        self.query = StatusQuery(context, lambda: STATUS, self.monitor, self._post)

    def _post(self, peer: int, message: Message) -> None:
        if message.kind is not MessageKind.UNRESPONSIVE:
            self.posted.append((peer, message))

    async def ask(self) -> Any:
        return await self.query.ask()

    def receive(self, sender: int, body: dict[str, Any], *tensors: torch.Tensor) -> None:
        kind = MessageKind.STATUS if "rank" in body else MessageKind.STATUS_QUERY
        message = Message(Channel.CONTROL, kind, tensors=tensors, body=body, sender=sender)
        self.query.handlers[kind](message)


def test_silence_takes_a_second_and_the_rank_on_the_way_is_named() -> None:
    rank = Silent()

    async def main() -> tuple[Any, float]:
        return await rank.ask(), asyncio.get_running_loop().time()

    job, seconds = run_virtual(main())
    assert seconds == timeouts.ANSWER_S
    assert [answer.absent for answer in job.answers] == [
        "does not answer",
        "",
        "cannot be reached: stage 0 does not answer",
        "does not answer",
        "does not answer",
        "cannot be reached: stage 0 does not answer",
        "cannot be reached: stage 0 does not answer",
    ]


def test_questions_to_a_silent_rank_do_not_pile_up() -> None:
    rank = Silent()

    async def main() -> None:
        for _ in range(MOST_ASKED + 3):
            await rank.ask()
        for number in range(5):  # of another rank
            rank.receive(0, {"number": number, "asker": 0})
        assert [peer for peer, message in rank.posted if "rank" not in message.body] == [0, 3, 4] * MOST_ASKED
        rank.posted.clear()
        rank.receive(3, {"number": 1, "asker": 1, "rank": 3}, PACKED)  # late, and yet a sign that it takes more
        await rank.ask()
        assert [peer for peer, _ in rank.posted] == [3]

    run_virtual(main())


async def test_a_question_is_answered_and_passed_on_and_so_are_answers() -> None:
    rank = Silent()
    rank.receive(4, {"number": 7, "asker": 4})
    assert [(peer, dict(message.body)) for peer, message in rank.posted] == [
        (4, {"number": 7, "asker": 4, "rank": 1}),
        (0, {"number": 7, "asker": 4}),
        (3, {"number": 7, "asker": 4}),
    ]
    rank.posted.clear()
    rank.receive(0, {"number": 7, "asker": 4, "rank": 2}, PACKED)
    ((peer, message),) = rank.posted
    assert (peer, message.body) == (4, {"number": 7, "asker": 4, "rank": 2})
    assert torch.equal(message.tensors[0], PACKED)  # type: ignore[arg-type]
    rank.monitor.close()


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
def test_a_question_or_a_status_of_another_rank_is_refused(sender: int, body: dict[str, Any]) -> None:
    rank = Silent()
    with pytest.raises(ProtocolError):
        rank.receive(sender, body)
    assert not rank.posted
