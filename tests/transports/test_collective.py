"""Messages over gloo: announcements good and bad, their order, and sends that are cancelled."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch
import transports.makers as makers
from transports.collective_pair import Held, announce, announce_raw, ends, link_of, post

from rrfp import timeouts
from rrfp.errors import ConfigError, FrameError, PeerLostError
from rrfp.testing.transport_checks import Pair
from rrfp.testing.transport_checks.pair import data, index_of, note, pass_on, receive, soon
from rrfp.transports.base import Channel, Plain
from rrfp.transports.tunnel.p2p import BESIDE, CREDIT, ENTRY, FAREWELL, STAGED, WANT

_LIMIT = 1 << 20


BAD: dict[str, tuple[str, Plain]] = {
    "no array": (BESIDE, "many"),
    "too short": (BESIDE, [0, []]),
    "no number": (f"{BESIDE}.number", ["0", [], None]),
    "negative": (f"{BESIDE}.number", [-1, [], None]),
    "no specs": ("tensors", [0, 5, None]),
    "too many specs": ("tensors", [0, [None, None], None]),
    "dtype": ("tensors[0].dtype", [0, [["object", [4], False]], None]),
    "shape": ("tensors[0].shape", [0, [["uint8", [-4], False]], None]),
    "gradient": ("tensors[0].requires_grad", [0, [["uint8", [4], True]], None]),
    "too large": ("tensors", [0, [["uint8", [_LIMIT + 1], False]], None]),
}


@pytest.mark.parametrize(("field", "entry"), BAD.values(), ids=BAD)
async def test_a_bad_announcement_is_one_frame_error_and_one_of_a_transfer_ends_the_link(
    field: str, entry: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the number is good its tensors may have been posted, and would be taken for those of the next one."""
    monkeypatch.setattr(timeouts, "FAREWELL_TIMEOUT_S", 0.05)
    async with ends(max_message_bytes=_LIMIT) as (left, right):
        await announce_raw(left, entry)
        with pytest.raises(FrameError) as raised:
            await soon(right.receive(), "the bad announcement is raised")
        assert (raised.value.peer, raised.value.field) == (0, field)
        assert right.statistics().dropped_frames == 1
        if isinstance(entry, list) and len(entry) == 3 and entry[0] == 0:
            await announce(left, ["float32", [3], False], number=1)
            with pytest.raises(PeerLostError, match="an announcement was refused"):
                await soon(right.receive(), "the loss is reported")
        else:
            pair = Pair(left, right, makers.RUN_ID)
            assert index_of(await pass_on(pair, data(torch.ones(3), index=5))) == 5


async def test_announcements_on_control_again_or_with_the_tensor_itself_are_refused() -> None:
    spec: list[Plain] = ["float32", [3], False]
    async with ends() as (left, right):
        await announce(left, spec, channel=Channel.CONTROL)
        await link_of(left).base.send(1, replace(data(torch.ones(3)), body={BESIDE: [0, [spec], None]}))
        await announce(left, spec, number=0)
        await link_of(left).base.send(1, replace(data(), body={ENTRY: 3}))
        for field in (BESIDE, "tensors[0]", f"{BESIDE}.number", ENTRY):
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
        await link_of(left).base.send(1, replace(note(), body={name: entry}))
        with pytest.raises(FrameError, match=name):
            await soon(right.receive(), "the bad entry is raised")


@pytest.mark.parametrize("name", [BESIDE, ENTRY, CREDIT, WANT, FAREWELL, STAGED])
async def test_a_body_with_an_entry_of_the_transport_s_own_is_refused(name: str) -> None:
    async with ends() as (left, _):
        with pytest.raises(ConfigError, match=name):
            await left.send(1, replace(note(), body={name: 1}))


async def test_an_announcement_that_overtook_an_earlier_one_waits_for_it() -> None:
    """The group is one FIFO, whatever channels the announcements came on."""
    async with ends() as (left, right):
        sent = [post(left, torch.full((3,), float(number))) for number in range(2)]
        await announce(left, ["float32", [3], False], number=1, channel=Channel.BACKWARD)
        await left.send(1, note(7))
        assert index_of(await receive(right)) == 7
        assert link_of(right).beside._incoming.number == 0
        await announce(left, ["float32", [3], False], number=0)
        values = {message.channel: message.tensors[0] for message in [await receive(right), await receive(right)]}
        assert values[Channel.FORWARD].tolist() == [0.0] * 3  # type: ignore[union-attr]
        assert values[Channel.BACKWARD].tolist() == [1.0] * 3  # type: ignore[union-attr]
        await soon(asyncio.gather(*sent), "both transfers end")


async def test_a_message_without_tensors_keeps_its_place_behind_one_with_tensors() -> None:
    async with ends() as (left, right):
        await announce(left, ["float32", [3], False])
        await left.send(1, data(index=5))
        await left.send(1, note(7))
        assert index_of(await receive(right)) == 7
        await soon(post(left, torch.ones(3)), "the transfer ends")
        assert [index_of(await receive(right)) for _ in range(2)] == [99, 5]


async def test_peers_without_a_group_exchange_tensors_over_the_base_transport() -> None:
    async with ends(data_peers=()) as (left, right):
        assert link_of(left).beside is None
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
