"""Tensors that go by slots of device memory: which ones, and bad announcements of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from compute.separate_double import SeparateDouble
from transports.on_device import base_of
from transports.slot_ends import Ends, ends, kinds
from transports.staged_ends import is_on, on

from rrfp.errors import ConfigError, FrameError
from rrfp.testing.transport_checks.pair import (
    assert_same,
    data,
    index_of,
    note,
    receive,
    soon,
)
from rrfp.transports.base import Channel, Message, Plain
from rrfp.transports.cuda_ipc.slots import SLOTS
from rrfp.transports.tunnel.p2p import BESIDE, ENTRY, STAGED

# Announcements.


async def announce(made: Ends, message: Message, body: Mapping[str, Plain]) -> None:
    """Send something past the checks of the left end's own."""
    await base_of(made.left).send(1, replace(message, body=dict(body)))


SPEC: list[Plain] = ["float32", [3], False]

BAD: dict[str, tuple[str, Mapping[str, Plain]]] = {
    "no array": (BESIDE, {BESIDE: "tensors"}),
    "no slot": (f"{ENTRY}.slot", {BESIDE: [7, [SPEC], None]}),
    "no number": (f"{BESIDE}.number", {BESIDE: ["0", [SPEC], 0]}),
    "too many specs": ("tensors", {BESIDE: [7, [SPEC, SPEC], 0]}),
    "shape": ("tensors[0].shape", {BESIDE: [7, [["float32", [-3], False]], 0]}),
    "shape, and no such slot": ("tensors[0].shape", {BESIDE: [7, [["float32", [-3], False]], SLOTS]}),
    "too large": ("tensors", {BESIDE: [7, [["float32", [1 << 20], False]], 0]}),
    "no such slot": (f"{ENTRY}.slot", {BESIDE: [7, [SPEC], SLOTS]}),
    "negative slot": (f"{ENTRY}.slot", {BESIDE: [7, [SPEC], -1]}),
    "slot by name": (f"{ENTRY}.slot", {BESIDE: [7, [SPEC], "0"]}),
    "a slot of an empty tensor": (f"{ENTRY}.slot", {BESIDE: [7, [["float32", [0], False]], 0]}),
    "a piece of nothing": (f"{ENTRY}.number", {ENTRY: [7, 0]}),
    "a piece of no number": (f"{ENTRY}.number", {ENTRY: [[7], 0]}),
    "a piece and more": (ENTRY, {ENTRY: [7, 0, 0]}),
    "given back, not lent": (f"{ENTRY}.slot", {ENTRY: 0}),
    "given back, no slot": (ENTRY, {ENTRY: None}),
}


@pytest.mark.parametrize(("field", "body"), BAD.values(), ids=BAD)
async def test_a_bad_announcement_is_one_frame_error_and_the_next_message_arrives(
    field: str, body: Mapping[str, Plain]
) -> None:
    async with ends(max_message_bytes=1 << 21) as made:
        await announce(made, data(None), body)
        with pytest.raises(FrameError) as raised:
            await soon(made.right.receive(), "the bad announcement is raised")
        assert (raised.value.peer, raised.value.field) == (0, field)
        await made.left.send(1, data(on(made.devices[0], 3), index=5))
        assert index_of(await receive(made.right)) == 5
        assert made.right.statistics().dropped_frames == 1


async def test_a_control_message_cannot_announce_tensors() -> None:
    async with ends() as made:
        await announce(made, replace(note(), tensors=(None,)), {BESIDE: [0, [SPEC], 0]})
        with pytest.raises(FrameError, match=BESIDE):
            await soon(made.right.receive(), "the bad announcement is raised")


@pytest.mark.parametrize("name", [BESIDE, ENTRY, STAGED])
async def test_a_body_with_an_entry_of_the_transport_s_own_is_refused(name: str) -> None:
    async with ends() as made:
        with pytest.raises(ConfigError, match=name):
            await made.left.send(1, replace(note(), body={name: 1}))


# What goes by slots, and what does not.


async def test_device_tensors_go_by_slots_and_all_others_come_with_the_announcement() -> None:
    source, sent_below = SeparateDouble(0.0), list[Message]()
    async with ends(source, SeparateDouble(0.0)) as made:
        assert kinds(made.left) == {1: "TunnelLink"}
        base = base_of(made.left)
        send = base.send

        async def recording(peer: int, message: Message) -> None:
            sent_below.append(message)
            await send(peer, message)

        base.send = recording
        sent = (on(source, 1, 2), torch.arange(3), None, on(source).reshape(0, 2), on(source, 5).requires_grad_())
        await made.left.send(1, data(*sent, flag=True))
        received = await receive(made.right)
        for index, tensor in enumerate(sent):
            assert_same(received.tensors[index], tensor, f"tensor {index}")
        where = [None if t is None else is_on(made.devices[1], t) for t in received.tensors]
        assert where == [True, False, None, True, True]
        assert dict(received.body) == {"flag": True}
    assert [tensor is None for tensor in sent_below[0].tensors] == [True, False, True, True, True]


async def test_device_tensors_of_control_messages_are_staged() -> None:
    source = SeparateDouble(0.0)
    async with ends(source, SeparateDouble(0.0)) as made:
        tensors = [on(source, 1), on(source, 2)]
        for index in range(2):
            await made.left.send(1, data(*tensors, index=index, channel=Channel.CONTROL))
            received = await receive(made.right)
            assert index_of(received) == index
            for tensor, want in zip(received.tensors, tensors, strict=True):
                assert is_on(made.devices[1], tensor)
                assert_same(tensor, want, "a staged tensor")
