"""The messages of two ranks without a pipeline: what is sent on one becomes an event, or an error, on the other."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest
import torch
from runtime.contexts import context_of

from rrfp import Topology
from rrfp.compute.payload import Payload
from rrfp.core import events as ev
from rrfp.errors import ProtocolError
from rrfp.model.graph import TaskGraph
from rrfp.model.mesh import Mesh
from rrfp.model.tasks import Kind, Mode, StepId, Task
from rrfp.runtime.messenger import Messenger
from rrfp.transports.base import Channel, Message, MessageKind
from rrfp.transports.rendezvous import LocalRendezvous

STEP = StepId(0, Mode.TRAIN, 4)
OUTPUT = Task(Kind.F, 2, 0)
GRAPH = TaskGraph.chain(2)


def control(kind: MessageKind, task: Task | None) -> Message:
    return Message(Channel.CONTROL, kind, STEP, task)


class TwoRanks:
    """Messengers of two connected ranks, and the events that they pass on."""

    def __init__(self, topologies: list[Topology]) -> None:
        met = LocalRendezvous()
        self.contexts = [context_of(topology, GRAPH, met) for topology in topologies]
        self.events: list[list[ev.Event]] = [[], []]
        self.arrived = asyncio.Event()
        self.messengers = [Messenger(context, self._recorder(rank)) for rank, context in enumerate(self.contexts)]

    def _recorder(self, rank: int) -> Any:
        def record(event: ev.Event) -> None:
            self.events[rank].append(event)
            if not isinstance(event, ev.SendReleased):
                self.arrived.set()

        return record

    async def __aenter__(self) -> TwoRanks:
        async with AsyncExitStack() as opened:
            await asyncio.gather(*(context.transport.start() for context in self.contexts))
            for context in self.contexts:
                opened.callback(context.transport.abort)
                await context.supervisor.start()
                opened.push_async_callback(context.supervisor.stop)
                context.activity.begin_step(STEP)
                context.recorder.open()
            self._opened = opened.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._opened.aclose()

    async def receive(self, rank: int) -> None:
        """Receive on ``rank`` until something has arrived; raises what receiving raises."""
        messenger = self.messengers[rank]
        handlers = {
            MessageKind.OUTPUT: messenger.on_output,
            MessageKind.CONSUMED: messenger.on_consumed,
            MessageKind.BEGUN: messenger.on_begun,
        }
        receiving = asyncio.create_task(messenger.receive_all(handlers))
        arriving = asyncio.create_task(self.arrived.wait())
        await asyncio.wait([receiving, arriving], return_when=asyncio.FIRST_COMPLETED)
        if receiving.done():
            arriving.cancel()
            receiving.result()
        receiving.cancel()
        with suppress(asyncio.CancelledError):
            await receiving


@pytest.mark.parametrize("consumed", [0, 3])
async def test_an_output_arrives_with_how_many_outputs_its_sender_has_used(consumed: int) -> None:
    async with TwoRanks([Topology(0, 2), Topology(1, 2)]) as ranks:
        sender, receiver = ranks.contexts
        payload = Payload.pack(torch.arange(3.0))
        sender.mailbox.put_forward(OUTPUT, payload)
        ranks.messengers[0].send_soon(ev.Send(OUTPUT, 1, consumed))
        await ranks.receive(1)
        assert ranks.events == [[ev.SendReleased(OUTPUT, 1)], [ev.Arrived(STEP, OUTPUT, 12, consumed)]]
        (tensor,) = receiver.mailbox.inputs(Task(Kind.F, 2, 1))[0].tensors
        assert tensor is not None
        assert tensor.tolist() == [0.0, 1.0, 2.0]
        assert [(messenger.sent, messenger.received) for messenger in ranks.messengers] == [(1, 0), (0, 1)]


async def test_a_credit_arrives_as_consumed() -> None:
    async with TwoRanks([Topology(0, 2), Topology(1, 2)]) as ranks:
        ranks.messengers[1].credit(ev.Credit(0, OUTPUT))
        await ranks.receive(0)
        assert ranks.events == [[ev.Consumed(STEP, 1, OUTPUT)], []]
        assert [(messenger.sent, messenger.received) for messenger in ranks.messengers] == [(0, 1), (1, 0)]


async def test_the_report_of_a_forward_that_has_begun_arrives_with_the_seconds_that_are_expected() -> None:
    async with TwoRanks([Topology(0, 2), Topology(1, 2)]) as ranks:
        ranks.messengers[0].send_soon(ev.ReportBegun(OUTPUT, 1, 0.25))
        await ranks.receive(1)
        assert ranks.events == [[], [ev.BegunReported(STEP, OUTPUT, 0.25)]]
        assert [(messenger.sent, messenger.received) for messenger in ranks.messengers] == [(1, 0), (0, 1)]


@pytest.mark.parametrize("seconds", [None, -1.0, 1, float("nan"), float("inf"), "1"])
async def test_a_report_of_a_forward_without_a_time_is_refused(seconds: Any) -> None:
    async with TwoRanks([Topology(0, 2), Topology(1, 2)]) as ranks:
        body = {"seconds": seconds}
        await ranks.messengers[0].send(1, Message(Channel.CONTROL, MessageKind.BEGUN, STEP, OUTPUT, body=body))
        with pytest.raises(ProtocolError, match=r"^rank 0 reported F2@0 for .* s, must be a float >= 0"):
            await ranks.receive(1)


async def test_messages_that_belong_to_no_step_are_not_counted() -> None:
    async with TwoRanks([Topology(0, 2), Topology(1, 2)]) as ranks:
        ranks.messengers[0].post(1, Message(Channel.CONTROL, MessageKind.PROBE))
        with pytest.raises(ProtocolError, match="rank 0 sent a probe message that rank 1 cannot use"):
            await ranks.receive(1)
        assert [(messenger.sent, messenger.received) for messenger in ranks.messengers] == [(0, 0), (0, 0)]


async def test_gradients_of_a_virtual_stage_that_does_not_exist_are_refused() -> None:
    async with TwoRanks([Topology(0, 2), Topology(1, 2)]) as ranks:
        body: Any = {"parts": []}
        message = Message(Channel.BACKWARD, MessageKind.OUTPUT, STEP, Task(Kind.B, 0, 9), (), body)
        await ranks.messengers[1].send(0, message)
        with pytest.raises(ProtocolError, match="B0@9 arrived, but the last virtual stage is 1"):
            await ranks.receive(0)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (
            Message(Channel.CONTROL, MessageKind.CONSUMED, STEP),
            "rank 1 sent a consumed message without a task or a step",
        ),
        (
            Message(Channel.CONTROL, MessageKind.CONSUMED, STEP, OUTPUT),
            "rank 1 sent F2@0: a rank of another replica, or another member of its group",
        ),
        (
            Message(Channel.CONTROL, MessageKind.ORDER, STEP, OUTPUT),
            "rank 1 sent a order message that rank 0 cannot use",
        ),
    ],
)
async def test_what_makes_no_sense_names_its_sender(message: Message, text: str) -> None:
    mesh = Mesh((("dp", 2), ("pp", 1)))
    async with TwoRanks([Topology.at(rank, mesh) for rank in range(2)]) as ranks:
        ranks.messengers[1].post(0, message)
        with pytest.raises(ProtocolError) as caught:
            await ranks.receive(0)
        assert str(caught.value) == f"{text} (reported by {ranks.contexts[0].topology.name_of(1)})"


async def test_an_error_at_a_step_s_opening_that_no_rank_sent_stays_as_it_is() -> None:
    async with TwoRanks([Topology(0, 2), Topology(1, 2)]) as ranks:
        error = ProtocolError("of nobody")
        with pytest.raises(ProtocolError) as raised, ranks.messengers[0].opening():
            raise error
        assert raised.value is error


async def test_after_it_has_left_what_peers_send_and_their_ends_concern_a_rank_no_more() -> None:
    async with TwoRanks([Topology(0, 2), Topology(1, 2)]) as ranks:
        messenger, handled = ranks.messengers[0], list[Message]()
        receiving = asyncio.create_task(messenger.receive_all({MessageKind.CONSUMED: handled.append}))
        messenger.leave(Message(Channel.CONTROL, MessageKind.CLOSED))
        await ranks.messengers[1].send(0, control(MessageKind.CONSUMED, OUTPUT))
        ranks.contexts[1].transport.abort()
        for _ in range(20):  # within a process all of it arrives in a few turns of the loop
            await asyncio.sleep(0)
        assert ranks.contexts[0].transport.statistics().messages_received == 1
        assert not receiving.done()
        assert handled == []
        receiving.cancel()
        with suppress(asyncio.CancelledError):
            await receiving
