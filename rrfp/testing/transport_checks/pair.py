"""Shared by the transport checks: the pair of transports under test, messages to send, and waiting with a timeout.

Checks wait for events, `PATIENCE_S` at most; to show that an event does *not* happen, they watch for `QUIET_S`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from rrfp.errors import RrfpError
from rrfp.model.tasks import Kind, Mode, StepId, Task
from rrfp.testing.checks import PATIENCE_S, DidNotHappenError
from rrfp.testing.checks import soon as soon
from rrfp.transports.base import Channel, Message, MessageKind, Plain, Transport, TransportContext, TransportStatistics
from rrfp.transports.registry import TransportSpec, create_transport
from rrfp.transports.rendezvous import LocalRendezvous
from rrfp.transports.secret import Secret

_Result = TypeVar("_Result")

#: The step of all messages of checks.
STEP = StepId(3, Mode.TRAIN, 1 << 20)

#: Of the pairs of `started_pair`.
RUN_ID = "checks"

#: Seconds for which a check watches that an event does not happen.
QUIET_S = 0.1


@dataclass(frozen=True)
class PairOptions:
    """A check's options for the maker, which passes them to every `TransportContext`.

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
        inject: sends a raw header and raw tensor frames in a channel from left to right, past the sender's checks.
            None where that is impossible: the checks of bad input are then skipped.
        silence: stops the left end from answering without ending it, as SIGSTOP or a pulled cable does; the transport's
            own patience must report it. None where that is impossible: that check is then skipped.
        read_ahead: messages that an end may read before ``receive`` asks for them, beyond ``queue_bytes``: more than 0
            only of a wrapper, such as one that copies them to a device.
        third: stage 2, where ``PairOptions.ranks`` is 3; None where the maker makes two only.
    """

    left: Transport
    right: Transport
    run_id: str
    inject: Callable[[Channel, bytes, Sequence[bytes]], Awaitable[None]] | None = None
    silence: Callable[[], Awaitable[None]] | None = None
    third: Transport | None = None
    read_ahead: int = 0


MakePair = Callable[[PairOptions], AbstractAsyncContextManager[Pair]]
"""Yields a started pair with the given options; afterwards frees all transports, whatever state they are in."""

Check = Callable[[MakePair], Coroutine[Any, Any, None]]
"""One check; raises AssertionError with one sentence about the breach, or SkippedError with the part that it lacks."""


def data(*tensors: Tensor | None, index: int = 0, channel: Channel = Channel.FORWARD, **body: Plain) -> Message:
    """A message with tensors; ``index`` is its microbatch."""
    kind = Kind.B if channel is Channel.BACKWARD else Kind.F
    return Message(channel, MessageKind.OUTPUT, STEP, Task(kind, index, 0), tensors, body)


def note(index: int = 0, **body: Plain) -> Message:
    """A control message; ``index`` is its microbatch."""
    return Message(Channel.CONTROL, MessageKind.PROBE, STEP, Task(Kind.F, index, 0), (), body)


def index_of(message: Message) -> int:
    """The ``index`` passed to `data` or `note`."""
    assert message.task is not None, f"a received {message.kind} message lost its task"
    return message.task.microbatch


class WrappedTransport(Transport):
    """Passes every call on to ``inner``."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner.context)
        self.carries = inner.carries
        self._inner = inner

    async def start(self) -> None:
        await self._inner.start()

    async def send(self, peer: int, message: Message) -> None:
        await self._inner.send(peer, message)

    async def receive(self) -> Message:
        return await self._inner.receive()

    async def close(self) -> None:
        await self._inner.close()

    def abort(self) -> None:
        self._inner.abort()

    def statistics(self) -> TransportStatistics:
        return self._inner.statistics()


async def stays_pending(task: asyncio.Task[Any], breach: str) -> None:
    """Watch for `QUIET_S` that ``task`` does not end."""
    done, _ = await asyncio.wait({task}, timeout=QUIET_S)
    assert not done, breach


@asynccontextmanager
async def running(coroutine: Coroutine[Any, Any, _Result]) -> AsyncIterator[asyncio.Task[_Result]]:
    """A task beside a check, cancelled at its end."""
    # An error that no check expects is raised in place of its effect.
    task = asyncio.create_task(coroutine)
    try:
        yield task
    except AssertionError:
        if _has_crashed(task):
            task.result()
        raise
    finally:
        task.cancel()
        await asyncio.wait({task})  # awaiting the task itself would replace the traceback of an error on its way
        if not task.cancelled():
            task.exception()  # else the loop reports it as never retrieved


def _has_crashed(task: asyncio.Task[Any]) -> bool:
    error = task.exception() if task.done() and not task.cancelled() else None
    return isinstance(error, Exception) and not isinstance(error, RrfpError | AssertionError)


async def receive(transport: Transport, event: str = "a message arrives") -> Message:
    """The next message, within `PATIENCE_S`."""
    return await soon(transport.receive(), event)


async def pass_on(pair: Pair, message: Message) -> Message:
    """Send from left to right and receive; either's error is raised."""
    async with running(pair.left.send(1, message)) as sending, running(pair.right.receive()) as receiving:
        done, _ = await asyncio.wait({sending, receiving}, timeout=PATIENCE_S, return_when=asyncio.FIRST_EXCEPTION)
        if sending in done:
            sending.result()
        if receiving not in done:
            raise DidNotHappenError.of("a message arrives")
        received = receiving.result()
        if sending not in done:
            raise DidNotHappenError.of("send returns once the message was received")
    return received


def bits(tensor: Tensor) -> Tensor:
    """The dense bytes of a tensor, so that NaN equals NaN."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def assert_same(received: Tensor | None, sent: Tensor | None, label: str) -> None:
    """Equal in dtype, shape, requires_grad and every bit."""
    if sent is None or received is None:
        assert received is sent, f"{label}: sent {_outline(sent)}, received {_outline(received)}"
        return
    assert _outline(received) == _outline(sent), f"{label}: sent {_outline(sent)}, received {_outline(received)}"
    assert received.is_leaf, f"{label}: the received tensor is not a leaf"
    assert torch.equal(bits(received), bits(sent)), f"{label}: the values differ"


def _outline(tensor: Tensor | None) -> object:
    return None if tensor is None else (tensor.dtype, tuple(tensor.shape), tensor.requires_grad)


@asynccontextmanager
async def started_pair(
    spec: TransportSpec, options: PairOptions, secret: Secret | None = None, *, allow_insecure: bool = False
) -> AsyncIterator[Pair]:
    """A started pair, or three transports with ``options.ranks`` 3; all are aborted in the end.

    With a ``secret`` tensors may travel in plain text, within this process.
    """
    rendezvous, ranks = LocalRendezvous(), range(options.ranks)
    transports = [
        create_transport(
            spec,
            TransportContext(
                rank=rank,
                peers=tuple(peer for peer in ranks if peer != rank),
                run_id=RUN_ID,
                rendezvous=rendezvous,
                queue_bytes=options.queue_bytes,
                max_message_bytes=options.max_message_bytes,
                connect_timeout_s=10.0,
                allow_insecure=allow_insecure,
                secret=secret,
                plain_data=secret is not None,
            ),
        )
        for rank in ranks
    ]
    try:
        await asyncio.gather(*(transport.start() for transport in transports))
        left, right, *others = transports
        yield Pair(left, right, RUN_ID, third=others[0] if others else None)
    finally:
        for transport in transports:
            transport.abort()
