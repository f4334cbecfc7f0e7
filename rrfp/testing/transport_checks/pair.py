"""What the transport checks share: the pair of transports under test, messages to send, and waiting with patience.

Checks wait for events; where one shows that something does *not* happen, it watches for `QUIET_S`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from rrfp.core.tasks import Kind, Mode, StepId, Task
from rrfp.transports.base import Channel, Message, MessageKind, Plain, Transport

_Result = TypeVar("_Result")

#: A step that check messages belong to.
STEP = StepId(3, Mode.TRAIN, 1 << 20)

#: Within this time everything that must happen has happened, in seconds.
PATIENCE_S = 20.0

#: For this time nothing happens when nothing may happen, in seconds.
QUIET_S = 0.1


@dataclass(frozen=True)
class PairOptions:
    """What a check asks of the maker, to be passed on to both `TransportContext`s.

    Attributes:
        queue_bytes: see `TransportContext`.
        max_message_bytes: see `TransportContext`.
        ranks: 2, or 3: then each of them has the two others as its peers.
    """

    queue_bytes: int = 64 << 20
    max_message_bytes: int = 1 << 30
    ranks: int = 2


@dataclass(frozen=True)
class Pair:
    """Two started transports.

    Attributes:
        left: stage 0; of two, its only peer is 1.
        right: stage 1; of two, its only peer is 0.
        run_id: of both.
        inject: puts a raw header and raw tensor frames into a channel from left to right, past the sender's checks.
            None where there is no way to do that: the checks of bad input are then skipped.
        silence: makes the left end stop answering from now on without ending, as SIGSTOP or a pulled cable does; a
            silent peer is reported by the transport's own patience. None where there is no way to do that.
        third: stage 2, where three ranks were asked for; None where the maker makes two only.
    """

    left: Transport
    right: Transport
    run_id: str
    inject: Callable[[Channel, bytes, Sequence[bytes]], Awaitable[None]] | None = None
    silence: Callable[[], Awaitable[None]] | None = None
    third: Transport | None = None


#: Yields a started pair with the options asked for; afterwards frees both, whatever state they are in.
MakePair = Callable[[PairOptions], AbstractAsyncContextManager[Pair]]

#: One check; raises AssertionError with a sentence that says what broke, or SkippedError with what it lacks.
Check = Callable[[MakePair], Coroutine[Any, Any, None]]


def data(*tensors: Tensor | None, index: int = 0, channel: Channel = Channel.FORWARD, **body: Plain) -> Message:
    """A message with tensors; ``index`` is its microbatch."""
    kind = Kind.B if channel is Channel.BACKWARD else Kind.F
    return Message(channel, MessageKind.OUTPUT, STEP, Task(kind, index, 0), tensors, body)


def note(index: int = 0, **body: Plain) -> Message:
    """A control message; ``index`` is its microbatch."""
    return Message(Channel.CONTROL, MessageKind.PROBE, STEP, Task(Kind.F, index, 0), (), body)


def index_of(message: Message) -> int:
    """The index that `data` or `note` was given."""
    assert message.task is not None, f"a received {message.kind} message lost its task"
    return message.task.microbatch


async def soon(awaitable: Awaitable[_Result], what: str) -> _Result:
    """Await with patience; ``what`` is the sentence when it runs out."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await awaitable
    except TimeoutError:
        raise AssertionError(f"{what}: did not happen within {PATIENCE_S:g} s") from None


async def stays_pending(task: asyncio.Task[Any], what: str) -> None:
    """Watch that ``task`` does not end."""
    done, _ = await asyncio.wait({task}, timeout=QUIET_S)
    assert not done, what


@asynccontextmanager
async def running(coroutine: Coroutine[Any, Any, _Result]) -> AsyncIterator[asyncio.Task[_Result]]:
    """A task beside a check, ended with it."""
    task = asyncio.create_task(coroutine)
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task


async def receive(transport: Transport, what: str = "a message arrives") -> Message:
    """The next message, with patience."""
    return await soon(transport.receive(), what)


async def pass_on(pair: Pair, message: Message) -> Message:
    """Send from left to right and receive."""
    async with running(pair.left.send(1, message)) as sending:
        received = await receive(pair.right)
        await soon(sending, "send returns once the message was received")
    return received


def bits(tensor: Tensor) -> bytes:
    """The dense bytes of a tensor, so that NaN equals NaN."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return bytes(dense.reshape(-1).view(torch.uint8).numpy().tobytes())


def assert_same(received: Tensor | None, sent: Tensor | None, what: str) -> None:
    """Equal in dtype, shape, requires_grad and every bit."""
    if sent is None or received is None:
        assert received is sent, f"{what}: sent {_outline(sent)}, received {_outline(received)}"
        return
    assert _outline(received) == _outline(sent), f"{what}: sent {_outline(sent)}, received {_outline(received)}"
    assert received.is_leaf, f"{what}: the received tensor is not a leaf"
    assert bits(received) == bits(sent), f"{what}: the values differ"


def _outline(tensor: Tensor | None) -> object:
    return None if tensor is None else (tensor.dtype, tuple(tensor.shape), tensor.requires_grad)
