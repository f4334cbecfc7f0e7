"""A rank that leaves in order, without a pipeline: between its last message and its end nothing reaches it any more.

Messages before that are in test_odd_messages.py, and where the engine is held equal to the runtime.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from runtime.contexts import context_of

from rrfp import Topology
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Kind, Mode, StepId, Task
from rrfp.runtime.messenger import Messenger
from rrfp.transports.base import Channel, Message, MessageKind
from rrfp.transports.rendezvous import LocalRendezvous


async def test_after_it_has_left_what_peers_send_and_their_ends_concern_a_rank_no_more() -> None:
    met, graph = LocalRendezvous(), TaskGraph.chain(2)
    contexts = [context_of(Topology(stage, 2), graph, met) for stage in range(2)]
    leaving, peer = (Messenger(context, lambda event: None) for context in contexts)
    await asyncio.gather(*(context.transport.start() for context in contexts))
    await asyncio.gather(*(context.supervisor.start() for context in contexts))
    handled = list[Message]()
    receiving = asyncio.create_task(leaving.receive_all({MessageKind.CONSUMED: handled.append}))
    leaving.leave(Message(Channel.CONTROL, MessageKind.CLOSED))
    consumed = Message(Channel.CONTROL, MessageKind.CONSUMED, StepId(0, Mode.TRAIN, 4), Task(Kind.F, 2, 0))
    await peer.send(0, consumed)
    contexts[1].transport.abort()
    for _ in range(20):  # within a process all of it arrives in a few turns of the loop
        await asyncio.sleep(0)
    assert contexts[0].transport.statistics().messages_received == 1
    assert not receiving.done()
    assert handled == []
    receiving.cancel()
    with suppress(asyncio.CancelledError):
        await receiving
    for context in contexts:
        await context.supervisor.stop()
        context.transport.abort()
