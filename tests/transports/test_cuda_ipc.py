"""Tensors that the receiver pulls: which ones, and bad announcements of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from compute.separate_double import SeparateDouble
from torch import Tensor
from transports.on_device import carrier_of
from transports.pulled_ends import Ends, ends, kinds, refusing
from transports.staged_ends import is_on, on

from rrfp.errors import ConfigError, FrameError
from rrfp.lab.device_double import DoubleSharing
from rrfp.testing.transport_checks.pair import (
    assert_same,
    data,
    index_of,
    note,
    receive,
    soon,
)
from rrfp.transports.base import Channel, Message, Plain
from rrfp.transports.carried.announcements import EDGE
from rrfp.transports.cuda_ipc.announcements import PULLED, SHARED
from rrfp.transports.cuda_ipc.transport import MOST_SHARED, PulledTransport

# Announcements.


async def announce(made: Ends, message: Message, body: Mapping[str, Plain]) -> None:
    """Send something past the checks of the left end's own."""
    await carrier_of(made.left).send(1, replace(message, body=dict(body)))


SPEC: list[Plain] = ["float32", [3], False]
MEMORY: dict[str, Plain] = {"process": 1, "descriptor": 5, "inode": 7, "length": 12}

BAD: dict[str, tuple[str, Mapping[str, Plain]]] = {
    "no memory": ("body", {EDGE: [0, [SPEC]]}),
    "no description": ("body", {SHARED: [MEMORY]}),
    "no number": (f"{EDGE}.number", {EDGE: ["0", [SPEC]], SHARED: [MEMORY]}),
    "too many specs": ("tensors", {EDGE: [0, [SPEC, SPEC]], SHARED: [MEMORY, MEMORY]}),
    "shape": ("tensors[0].shape", {EDGE: [0, [["float32", [-3], False]]], SHARED: [MEMORY]}),
    "too large": ("tensors", {EDGE: [0, [["float32", [1 << 20], False]]], SHARED: [MEMORY]}),
    "no array": (SHARED, {EDGE: [0, [SPEC]], SHARED: "memory"}),
    "too few": (SHARED, {EDGE: [0, [SPEC]], SHARED: []}),
    "no map": (f"{SHARED}[0]", {EDGE: [0, [SPEC]], SHARED: [5]}),
    "null": (f"{SHARED}[0]", {EDGE: [0, [SPEC]], SHARED: [None]}),
    "memory of an empty tensor": (f"{SHARED}[0]", {EDGE: [0, [["float32", [0], False]]], SHARED: [MEMORY]}),
    "absent field": (f"{SHARED}[0].inode", {EDGE: [0, [SPEC]], SHARED: [{"process": 1, "descriptor": 5}]}),
    "bad field": (f"{SHARED}[0].process", {EDGE: [0, [SPEC]], SHARED: [MEMORY | {"process": "1"}]}),
    "other length": (f"{SHARED}[0].length", {EDGE: [0, [SPEC]], SHARED: [MEMORY | {"length": 11}]}),
    "acknowledged, not announced": (PULLED, {PULLED: 7}),
    "acknowledged, no number": (PULLED, {PULLED: None}),
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
        await announce(made, replace(note(), tensors=(None,)), {EDGE: [0, [SPEC]], SHARED: [MEMORY]})
        with pytest.raises(FrameError, match=SHARED):
            await soon(made.right.receive(), "the bad announcement is raised")


@pytest.mark.parametrize("name", [EDGE, SHARED, PULLED])
async def test_a_body_with_an_entry_of_the_transport_s_own_is_refused(name: str) -> None:
    async with ends() as made:
        with pytest.raises(ConfigError, match=name):
            await made.left.send(1, replace(note(), body={name: 1}))


# What is pulled, and what is not.


class Watched(DoubleSharing):
    """Counts."""

    def __init__(self) -> None:
        self.shared = 0

    def share(self, tensor: Tensor) -> tuple[dict[str, Any], object]:
        self.shared += 1
        return super().share(tensor)


async def test_device_tensors_are_pulled_and_all_others_come_with_the_announcement() -> None:
    source = SeparateDouble(0.0)
    source.sharing = watched = Watched()
    async with ends(source, SeparateDouble(0.0)) as made:
        assert watched.shared == 1  # the trial's
        sent = (on(source, 1, 2), torch.arange(3), None, on(source).reshape(0, 2), on(source, 5).requires_grad_())
        await made.left.send(1, data(*sent, flag=True))
        received = await receive(made.right)
        for index, tensor in enumerate(sent):
            assert_same(received.tensors[index], tensor, f"tensor {index}")
        where = [None if t is None else is_on(made.devices[1], t) for t in received.tensors]
        assert where == [True, False, None, True, True]
        assert dict(received.body) == {"flag": True}
        assert watched.shared == 3


@pytest.mark.parametrize("kind", ["control", "many", "refused"])
async def test_tensors_that_cannot_be_pulled_are_staged(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    source = refusing("share", calls=1) if kind == "refused" else SeparateDouble(0.0)
    async with ends(source, SeparateDouble(0.0)) as made:
        assert kinds(made.left) == {1: PulledTransport}
        tensors = [on(source, index) for index in range(MOST_SHARED + 1 if kind == "many" else 2)]
        for index in range(2):
            message = data(*tensors, index=index, channel=Channel.CONTROL if kind == "control" else Channel.FORWARD)
            await made.left.send(1, message)
            received = await receive(made.right)
            assert index_of(received) == index
            for tensor, want in zip(received.tensors, tensors, strict=True):
                assert is_on(made.devices[1], tensor)
                assert_same(tensor, want, "a staged tensor")
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    refused = ["device tensors for rank 1 pass through host memory: operation not supported"]
    assert warnings == (refused if kind == "refused" else [])
