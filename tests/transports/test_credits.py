"""Credit goes back for half a window, or when a sender waits for it: never for each message, and nobody waits long."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import torch
from transports.makers import MAKERS

from rrfp import timeouts
from rrfp.errors import FrameError
from rrfp.testing.transport_checks.pair import PairOptions, data, index_of, receive, soon
from rrfp.transports.base import Channel, DeliversMessages
from rrfp.transports.links.flow import Credits, cost_of

WINDOW = 100_000

#: Channel, bytes and messages of a credit frame.
Frame = tuple[str, int, int]


@pytest.fixture(autouse=True)
def no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender that needs the timer waits forever here."""
    monkeypatch.setattr(timeouts, "CREDIT_DELAY_S", 3600.0)


@pytest.fixture
def frames() -> list[Frame]:
    return []


@pytest.fixture
async def credits(frames: list[Frame]) -> AsyncIterator[Credits]:
    made = Credits(WINDOW, lambda *frame: frames.append(frame))
    yield made
    made.close()


def ask(credits: Credits, *fields: object) -> None:
    credits.want(1, "want", list(fields))


async def test_credit_is_one_frame_for_half_a_window(credits: Credits, frames: list[Frame]) -> None:
    size = WINDOW // 10 - 512
    for _ in range(4):
        credits.consumed(Channel.FORWARD, size)
    assert frames == []
    credits.consumed(Channel.FORWARD, size)
    assert frames == [("forward", WINDOW // 2, 5)]


async def test_who_asks_gets_at_once_what_was_consumed(credits: Credits, frames: list[Frame]) -> None:
    credits.consumed(Channel.FORWARD, 10)
    credits.consumed(Channel.BACKWARD, 20)
    ask(credits, "forward")
    credits.consumed(Channel.FORWARD, 30)
    assert frames == [("forward", cost_of(10), 1)]


async def test_who_asks_too_early_gets_the_next_that_is_consumed(credits: Credits, frames: list[Frame]) -> None:
    ask(credits, "forward")
    credits.consumed(Channel.BACKWARD, 20)
    assert frames == []
    credits.consumed(Channel.FORWARD, 10)
    credits.consumed(Channel.FORWARD, 30)
    assert frames == [("forward", cost_of(10), 1)]


@pytest.mark.parametrize("fields", [(), ("forward", 1), ("sideways",), (7,)])
async def test_a_malformed_question_is_a_frame_error(credits: Credits, fields: tuple[object, ...]) -> None:
    with pytest.raises(FrameError, match="want"):
        ask(credits, *fields)


@pytest.mark.parametrize("name", ["shm", "zmq-ipc", "shm-threads", "auto-mixed", "collective", "collective-inproc"])
@pytest.mark.parametrize("directly", [False, True])
@pytest.mark.parametrize("size", [80_000, 3 * WINDOW], ids=["less than the window", "more than the window"])
async def test_no_sender_waits_for_credit_that_is_kept_back(name: str, size: int, directly: bool) -> None:
    async with MAKERS[name](PairOptions(queue_bytes=WINDOW)) as pair:
        if directly and isinstance(pair.right, DeliversMessages):
            pair.right.deliver_to(lambda _: None)
            for index in range(4):
                for num_bytes in (40_000, size):
                    await soon(pair.left.send(1, data(torch.zeros(num_bytes, dtype=torch.uint8), index=index)), "sent")
            return
        for index in range(4):
            for num_bytes in (40_000, size):
                await soon(pair.left.send(1, data(torch.zeros(num_bytes, dtype=torch.uint8), index=index)), "sent")
                assert index_of(await receive(pair.right)) == index
