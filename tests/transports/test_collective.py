"""Messages over gloo: announcements good and bad, their order, and sends that are cancelled."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import transports.makers as makers
from transports.collective_pair import Held, announce, ends

from rrfp.errors import ConfigError, FrameError
from rrfp.testing.transport_checks import Pair
from rrfp.testing.transport_checks.pair import data, index_of, note, pass_on, receive, soon
from rrfp.transports import DeviceCopies
from rrfp.transports.base import Channel, Plain
from rrfp.transports.carried.announcements import CREDIT, EDGE, FAREWELL, WANT
from rrfp.transports.carried.outlet import Sender
from rrfp.transports.carried.wires import Edge
from rrfp.transports.collective.gloo import GlooBackend
from rrfp.transports.inproc import InprocTransport

_LIMIT = 1 << 20


BAD: dict[str, tuple[str, Plain]] = {
    "no array": (EDGE, "many"),
    "too short": (EDGE, [0]),
    "no number": (f"{EDGE}.number", ["0", []]),
    "negative": (f"{EDGE}.number", [-1, []]),
    "no specs": ("tensors", [0, 5]),
    "too many specs": ("tensors", [0, [None, None]]),
    "dtype": ("tensors[0].dtype", [0, [["object", [4], False]]]),
    "shape": ("tensors[0].shape", [0, [["uint8", [-4], False]]]),
    "gradient": ("tensors[0].requires_grad", [0, [["uint8", [4], True]]]),
    "too large": ("tensors", [0, [["uint8", [_LIMIT + 1], False]]]),
}


@pytest.mark.parametrize(("field", "entry"), BAD.values(), ids=BAD)
async def test_a_bad_announcement_is_one_frame_error_and_the_next_message_arrives(field: str, entry: Plain) -> None:
    """One whose number is good takes that number: its tensors may have been posted."""
    async with ends(max_message_bytes=_LIMIT) as (left, right):
        await left._carrier.send(1, replace(data(None), body={EDGE: entry}))
        with pytest.raises(FrameError) as raised:
            await soon(right.receive(), "the bad announcement is raised")
        assert (raised.value.peer, raised.value.field) == (0, field)
        assert right.statistics().dropped_frames == 1
        if isinstance(entry, list) and len(entry) == 2 and entry[0] == 0:
            left._links[1]._sender._edge.number += 1  # type: ignore[union-attr]
        pair = Pair(left, right, makers.RUN_ID)
        assert index_of(await pass_on(pair, data(torch.ones(3), index=5))) == 5


async def test_announcements_on_control_again_or_with_the_tensor_itself_are_refused() -> None:
    spec: list[Plain] = ["float32", [3], False]
    async with ends() as (left, right):
        carrier = left._carrier
        await announce(left, spec, channel=Channel.CONTROL)
        await carrier.send(1, replace(data(torch.ones(3)), body={EDGE: [0, [spec]]}))
        await announce(left, spec, number=0)
        for field in (EDGE, "tensors[0]", f"{EDGE}.number"):
            with pytest.raises(FrameError) as raised:
                await soon(right.receive(), f"{field} is raised")
            assert raised.value.field == field


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        (CREDIT, ["forward", 1]),
        (CREDIT, ["sideways", 1, 1]),
        (CREDIT, ["forward", -1, 1]),
        (WANT, []),
        (WANT, ["sideways"]),
    ],
    ids=str,
)
async def test_a_bad_entry_of_the_links_is_one_frame_error(name: str, entry: Plain) -> None:
    async with ends() as (left, right):
        await left._carrier.send(1, replace(note(), body={name: entry}))
        with pytest.raises(FrameError, match=name):
            await soon(right.receive(), "the bad entry is raised")


@pytest.mark.parametrize("name", [EDGE, CREDIT, WANT, FAREWELL])
async def test_a_body_with_an_entry_of_the_transport_s_own_is_refused(name: str) -> None:
    async with ends() as (left, _):
        with pytest.raises(ConfigError, match=name):
            await left.send(1, replace(note(), body={name: 1}))


async def test_an_announcement_that_overtook_an_earlier_one_waits_for_it() -> None:
    """The edge is one FIFO, whatever channels the announcements came on."""
    async with ends() as (left, right):
        edge = left._links[1]._sender._edge
        assert edge is not None
        sent = [edge.post([torch.full((3,), float(number))]) for number in range(2)]
        await announce(left, ["float32", [3], False], number=1, channel=Channel.BACKWARD)
        await left.send(1, note(7))
        assert index_of(await receive(right)) == 7
        assert right._links[0]._arrivals.posted == 0
        await announce(left, ["float32", [3], False], number=0)
        values = {message.channel: message.tensors[0] for message in [await receive(right), await receive(right)]}
        assert values[Channel.FORWARD].tolist() == [0.0] * 3  # type: ignore[union-attr]
        assert values[Channel.BACKWARD].tolist() == [1.0] * 3  # type: ignore[union-attr]
        await soon(asyncio.gather(*sent), "both transfers end")


async def test_a_message_without_tensors_keeps_its_place_behind_one_with_tensors() -> None:
    async with ends() as (left, right):
        edge = left._links[1]._sender._edge
        assert edge is not None
        await announce(left, ["float32", [3], False])
        await left.send(1, data(index=5))
        await left.send(1, note(7))
        assert index_of(await receive(right)) == 7
        await soon(edge.post([torch.ones(3)]), "the transfer ends")
        assert [index_of(await receive(right)) for _ in range(2)] == [99, 5]


async def test_peers_without_an_edge_exchange_tensors_over_the_carrier() -> None:
    async with ends(data_peers=()) as (left, right):
        assert left._links[1]._sender._edge is None
        pair = Pair(left, right, makers.RUN_ID)
        message = await pass_on(pair, data(torch.arange(4.0), None, torch.empty(0)))
        assert message.tensors[0].tolist() == [0.0, 1.0, 2.0, 3.0]  # type: ignore[union-attr]


async def test_a_send_cancelled_after_its_announcement_waits_until_its_memory_is_free() -> None:
    async with ends() as (left, right):
        held = Held(right)
        tensor = torch.ones(3)
        sending = asyncio.create_task(left.send(1, data(tensor, index=3)))
        await soon(held.announced.wait(), "the announcement comes")
        sending.cancel()
        done, _ = await asyncio.wait({sending}, timeout=0.05)
        assert not done
        held.release()
        assert index_of(await receive(right)) == 3
        await soon(asyncio.wait({sending}), "the send ends")
        assert sending.cancelled()


def test_a_tensor_of_the_device_that_cannot_be_sent_is_refused_before_its_announcement() -> None:
    """The kind "meta" stands for the device: behind the announcement the edge would be lost with the tensor."""

    class Copies:
        kind, index = "meta", None

        def holds(self, tensor: torch.Tensor) -> bool:
            return tensor.is_meta

    class Holding(GlooBackend):
        def holds(self, tensor: torch.Tensor) -> bool:
            return True

    context = replace(makers.contexts()[0], copies=cast(DeviceCopies, Copies()))
    backend, carrier, edge = Holding(0, "127.0.0.1"), InprocTransport(context), cast(Edge, object())
    sender = Sender(1, carrier, edge, backend, _LIMIT, cast(Any, None))
    assert sender.on_edge(data(torch.empty(3, device="meta"))) == [True]
    with pytest.raises(ConfigError, match=r"tensor layout is torch\.sparse_coo"):
        sender.on_edge(data(torch.empty(3, 3, device="meta", layout=torch.sparse_coo)))
