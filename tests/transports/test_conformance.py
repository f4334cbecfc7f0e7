"""Every transport keeps the contract."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import transports.makers as makers
import transports.on_device as on_device
import transports.remote as remote
import uvloop
from batches import long
from fork_server import fork_server
from transports.checks import CHECKS

from rrfp.errors import PeerLostError
from rrfp.lab.simulated_transport import SimulatedTransport
from rrfp.testing.clock import run_virtual
from rrfp.testing.transport_checks import (
    Check,
    MakePair,
    NotOfferedError,
    Pair,
    PairOptions,
    SkippedError,
    check_codec,
    run_transport_checks,
)
from rrfp.transports.base import Channel, Message

# complex32 is experimental to torch, which says so once.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


MAKERS = makers.MAKERS | on_device.MAKERS | remote.MAKERS

__all__ = ["fork_server"]


#: Those that differ from another one only in what is below the contract.
TWINS = (
    "collective-inproc",
    "collective-threads",
    "simulated-late",
    "staged-inproc",
    "staged-zmq",
    "zmq-plain-data",
    "shm-process",
    *("cuda-ipc-zmq", "cuda-ipc-process"),
)


#: Those whose shortcuts every test run tries; the others differ from one of them in nothing that concerns these.
DIRECT = ("collective", "shm", "zmq-ipc", "auto-mixed")


def combinations() -> Iterator[Any]:
    """Every check with every maker."""
    for maker in MAKERS:
        for name, check in CHECKS.items():
            is_twin = maker in TWINS or (name.endswith("_directly") and maker not in DIRECT)
            marks = [pytest.mark.long] if is_twin else []
            if name == "statistics":
                marks.append(pytest.mark.allow_blocking(reason="it asks another thread while the loop stands still"))
            yield pytest.param(maker, check, id=f"{maker}-{name}", marks=marks)


@pytest.mark.parametrize(("maker", "check"), list(combinations()))
async def test_contract(maker: str, check: Check) -> None:
    with skipping(maker, check):
        await check(MAKERS[maker])


@pytest.mark.parametrize("maker", ["shm-process", long("cuda-ipc-process")])
async def test_a_stopped_process_is_a_silent_peer(maker: str) -> None:
    await CHECKS["silent_peer"](MAKERS[maker])


@pytest.mark.parametrize("check", ["every_dtype", "memory_layouts", "received_memory_is_its_own"])
async def test_tensors_are_pulled_out_of_another_process(check: str) -> None:
    await CHECKS[check](MAKERS["cuda-ipc-process"])


#: What cannot be looked at: nothing travels as bytes there, or nothing can make a peer silent in one process.
SKIPPED = {maker: {"check_bad_frames", "check_silent_peer"} for maker in MAKERS} | {
    "collective": {"check_silent_peer"},
    "cuda-ipc": {"check_silent_peer"},
    "shm": {"check_silent_peer"},
    "shm-process": set(),
    "cuda-ipc-process": set(),
    "staged-shm": {"check_silent_peer"},
    "staged-zmq": {"check_silent_peer"},
    "zmq-ipc": {"check_silent_peer"},
    "zmq-tcp": {"check_silent_peer"},
    "zmq-curve": {"check_silent_peer"},
    "zmq-plain-data": {"check_silent_peer"},
    "zmq-relayed": {"check_bad_frames"},
}


@contextmanager
def skipping(maker: str, check: Check) -> Iterator[None]:
    """Inside, ``check`` is skipped where that is expected, and only there."""
    if check.__name__.endswith("_directly") and not maker.startswith(("auto", "collective", "shm", "zmq")):
        with pytest.raises(NotOfferedError):
            yield
        return
    if check.__name__.removesuffix("_directly") not in SKIPPED[maker]:
        yield
        return
    with pytest.raises(SkippedError):
        yield


class Impatient(SimulatedTransport):
    """Takes two seconds without a message for the end of its peer, and says so once."""

    has_told = False

    async def receive(self) -> Message:
        try:
            async with asyncio.timeout(None if self.has_told else 2.0):
                return await super().receive()
        except TimeoutError:
            self.has_told = True
            raise PeerLostError(0, "nothing was heard of it for 2 s") from None


def silenced(make: type[SimulatedTransport]) -> MakePair:
    """Pairs that send nothing by themselves, so that nothing has to be done for silence."""

    @asynccontextmanager
    async def make_pair(options: PairOptions) -> AsyncIterator[Pair]:
        async with makers.started(*map(make, makers.contexts(options))) as pair:
            yield replace(pair, silence=lambda: asyncio.sleep(0))

    return make_pair


def test_a_silent_peer_must_be_reported_and_only_once() -> None:
    run_virtual(CHECKS["silent_peer"](silenced(Impatient)))
    with pytest.raises(AssertionError, match="receive from a peer that fell silent raises PeerLostError: did not"):
        run_virtual(CHECKS["silent_peer"](silenced(SimulatedTransport)))


def test_a_maker_that_makes_two_ranks_only_is_told_what_is_skipped() -> None:
    def make_pair(options: PairOptions) -> Any:
        return makers.simulated()(replace(options, ranks=2))

    with pytest.raises(SkippedError, match=r"it does not read PairOptions\.ranks"):
        run_virtual(CHECKS["three_ranks"](make_pair))


class Lossy(SimulatedTransport):
    """Loses the third message of a channel."""

    async def send(self, peer: int, message: Message) -> None:
        if message.task is None or message.task.microbatch != 2 or message.channel is not Channel.FORWARD:
            await super().send(peer, message)


def test_a_check_that_waits_in_vain_says_which_messages_were_lost() -> None:
    with pytest.raises(AssertionError) as caught:
        run_virtual(CHECKS["fifo_per_channel"](silenced(Lossy)))
    lost = "output F2@0 on forward from rank"
    assert str(caught.value) == (
        f"all messages arrive: did not happen within 20 s; sent and not received: {lost} 0 to 1, {lost} 1 to 0"
    )


class Broken(SimulatedTransport):
    """Has a slip of the pen in one method."""

    async def send(self, peer: int, message: Message) -> None:
        raise TypeError("a slip of the pen")


@pytest.mark.parametrize("check", ["every_dtype", "fifo_per_channel", "three_ranks"])
def test_an_error_in_the_transport_itself_is_raised_in_place_of_the_message_that_does_not_come(check: str) -> None:
    with pytest.raises(TypeError, match="a slip of the pen") as caught:
        run_virtual(CHECKS[check](silenced(Broken)))
    assert [entry.name for entry in caught.traceback][-1] == "send"


def test_the_codec_names_every_bad_frame() -> None:
    check_codec()


async def test_a_run_of_all_checks_tells_which_did_not_look() -> None:
    skipped = await run_transport_checks(makers.MAKERS["inproc"])
    assert skipped == {
        "check_silent_peer": "the pair has no `silence` to stop a peer from answering",
        "check_bad_frames": "the pair has no `inject` to send bad frames",
    }


@pytest.mark.parametrize("maker", ["inproc", "simulated-late", "zmq-ipc"])
def test_contract_on_uvloop(maker: str) -> None:
    uvloop.run(run_transport_checks(makers.MAKERS[maker]))


#: Give up waiting again and again without a pause: virtual time stands still meanwhile, and what is late never comes.
SPINNING = ("large_tensor", "cancelled_receive")


@pytest.mark.parametrize(
    ("maker", "check"),
    [
        pytest.param(maker, check, id=f"{maker}-{name}")
        for maker in ("inproc", "simulated", "simulated-late")
        for name, check in CHECKS.items()
        if maker != "simulated-late" or name not in SPINNING
    ],
)
def test_contract_in_virtual_time(maker: str, check: Check) -> None:
    with skipping(maker, check):
        run_virtual(check(makers.MAKERS[maker]))
