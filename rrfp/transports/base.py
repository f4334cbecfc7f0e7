"""The contract of a transport: how messages travel between the ranks of one pipeline.

A transport moves :class:`Message` values. It knows no readiness, schedules or memory limits: those are above
it.

The contract, which `rrfp.testing.transport_checks` verifies for any implementation:

- **Reliable**: a message that ``send`` accepted arrives once, whole, unless the peer or this rank ends first.
- **Three channels** a peer, CONTROL, FORWARD and BACKWARD. Each is a FIFO; none waits for another. In particular a
  control message never waits behind tensors.
- ``await send(...)`` returns when the caller's memory is no longer read. That is *not* delivery. Until then the caller
  must not write to the tensors. A cancelled ``send`` has sent the whole message or nothing of it.
- **Bounded**: bytes queued for a peer are bounded by ``queue_bytes`` (one message larger than that travels alone);
  ``send`` waits, the receiver's memory does not grow because the sender is fast.
- ``receive`` returns messages of all peers; which peer comes first is free, the order inside a channel is not.
  Cancelling it loses nothing. Received tensors are read-only by contract: a stage program must not write into them.
- **Peer death**: for a peer that died, or was silent for ``patience_s``, ``receive`` raises :class:`PeerLostError`
  once, after every message that the peer had delivered; ``send`` to it raises the same from then on. A peer that closed
  in order is not an error for ``receive``.
- **Bad input** from a peer is dropped and raised by ``receive`` as one :class:`FrameError` that names peer and field.
  The next call returns the next message. A frame of another run or restart names no peer. Whatever comes over a
  connection that is no peer's is dropped and counted, and raised by nothing.
- **Devices**: tensors on the rank's device are complete when they are passed to ``send``, and those that ``receive``
  returns are complete. They arrive on the receiver's device, or on the CPU where it has none; tensors on the CPU
  arrive on the CPU. One message may have both. A transport whose `Transport.carries` does not name the device need not
  care: it is wrapped.
- ``close`` delivers the accepted messages, notifies the peers and frees all resources; ``abort`` frees them at once.
  Both may be called twice, and while other calls wait: those then raise :class:`TransportClosedError`.

All methods are called on the loop that called ``start``, except ``statistics``, which any thread may call at any time.
Nothing is ever unpickled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from rrfp import timeouts
from rrfp.errors import RrfpError
from rrfp.model.record import record
from rrfp.model.tasks import StepId, Task
from rrfp.transports.secret import Secret, check_security

if TYPE_CHECKING:
    from torch import Tensor

    from rrfp.devices.copies import DeviceCopies


Plain = None | bool | int | float | str | bytes | Sequence["Plain"] | Mapping[str, "Plain"]
"""Plain data that msgpack carries: the body of a message."""

DEFAULT_QUEUE_BYTES = 64 << 20
DEFAULT_MAX_MESSAGE_BYTES = 4 << 30


class Channel(StrEnum):
    """An independent FIFO to a peer."""

    CONTROL = "control"
    FORWARD = "forward"
    BACKWARD = "backward"


class MessageKind(StrEnum):
    """The meaning of a message."""

    OUTPUT = "output"  # tensors: the output of `task`
    TIE = "tie"  # tensors: a piece of the gradient of a tied parameter, or of the sum of all its copies
    MICROBATCH = "microbatch"  # tensors: what a caller passed for `task`'s microbatch, to the replica that runs it
    COPY = "copy"  # tensors: what a caller passed for `task`'s microbatch (no task: for all), kept by another replica
    SHARE = "share"  # tensors: what a caller has for a step, to this stage's ranks in the other replicas
    OFFERED = (
        "offered"  # to all copies of a stage: the forward `task` may be claimed (body: copy, the sender's replica)
    )
    CLAIMED = "claimed"  # ... to the rank that offered it: the sender asks to run it (body: copy, its replica)
    GRANTED = "granted"  # ... to all other copies: replica `copy` runs it
    CONSUMED = "consumed"  # forward only: the credit for `task`'s output
    BEGUN = "begun"  # the forward `task`, whose output will come, has begun (body: seconds that it is expected to take)
    ECHO = "echo"  # to a stage that reads this one's outputs, which sends it back (body: number, back)
    READY = "ready"  # tensor parallelism: `task` may run on this rank
    ORDER = "order"  # tensor parallelism: log entry `sequence` is `task`
    HELD = "held"  # tensor parallelism: bytes that `task` left on this rank
    PROPOSE = "propose"  # agreement instead of a leader: this rank's choice is `task`
    OUTCOME = "outcome"  # ... all members chose `task`, or (no task) they differ
    PROMPT = "prompt"  # ... propose again
    REPORT = "report"  # all-gather, towards rank 0: the values of a rank and of those below it in the control tree
    RESULT = "result"  # all-gather, from rank 0 to all: everyone's values
    PROBE = "probe"  # from an idle rank towards rank 0: why does nothing move?
    ACKNOWLEDGED = "acknowledged"  # the answer to a probe
    STATUS_QUERY = "status_query"  # from `asker` along the control tree to all ranks (body: number, asker)
    STATUS = "status"  # back to `asker`: the status of `rank` (body: number, asker, rank)
    VERDICT = "verdict"  # from rank 0 to all: why nothing moves (body: first, the lowest rank that waits)
    UNRESPONSIVE = "unresponsive"  # from peer to peer: the loop of `rank` has not run for `seconds`
    CLOSED = "closed"  # body: the sender's caller left in order, after so many steps
    ABORT = "abort"  # body: origin of a failure


@record
class Message:
    """One message between two ranks.

    Attributes:
        channel: the FIFO it travels in.
        kind: its meaning.
        step: the sender's step; None where the message belongs to no step (abort).
        task: the task that the message names, if any.
        tensors: its tensors; None stands for "no gradient". Dtype, shape and requires_grad travel along; a received
            tensor is a leaf that requires grad exactly if the sent one did.
        body: further plain data, small.
        sequence: counts the messages of a (sender, channel); set by the sending transport, checked by the receiving
            one.
        sender: rank of the sender; set by the receiving transport.
    """

    channel: Channel
    kind: MessageKind
    step: StepId | None = None
    task: Task | None = None
    tensors: tuple[Tensor | None, ...] = ()
    body: Mapping[str, Plain] = field(default_factory=dict)
    sequence: int = 0
    sender: int = -1

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, dense."""
        total = 0
        for tensor in self.tensors:  # no generator, which takes longer than all else here
            if tensor is not None:
                total += tensor.numel() * tensor.element_size()
        return total


class Rendezvous(Protocol):
    """A store in which ranks publish their endpoints and look up each other's. Keys are unique to a run and restart."""

    async def publish(self, key: str, value: bytes) -> None:
        """Store a value and wake the ranks that wait for it.

        Args:
            key: unique to the publishing rank.
            value: its endpoint, as the transport writes it.

        Raises:
            TransportError: if the store fails.
        """

    async def lookup(self, key: str, timeout_s: float) -> bytes:
        """Wait for a value. Cancelling leaves nothing behind.

        Args:
            key: the publisher's.
            timeout_s: seconds to wait.

        Returns:
            The published value.

        Raises:
            TransportError: if no rank published it within ``timeout_s``, or the store fails; the message names the key.
        """


@dataclass(frozen=True, slots=True)
class TransportContext:
    """The arguments of every transport.

    Attributes:
        rank: this rank.
        peers: the ranks with which it exchanges messages.
        run_id: the job; frames of another run are refused.
        rendezvous: where endpoints are published.
        restart: the job's restart count; frames from before a restart are refused.
        single_host: all ranks run on this host.
        queue_bytes: most bytes queued for one peer and channel before ``send`` waits.
        max_message_bytes: larger announced messages are refused before anything is allocated.
        allow_insecure: permit tcp without authentication and encryption.
        connect_timeout_s: how long ``start`` waits for the peers, in seconds.
        heartbeat_s: seconds of silence after which a peer is sent a heartbeat.
        patience_s: how long a connected peer may be silent before it is lost, in seconds.
        copies: copies tensors of this rank's device; None where it computes on the CPU. Only a transport that `carries`
            the device uses it, and closes it when it closes or aborts.
        data_peers: those of the peers with which it exchanges tensors, for transports whose connections are expensive;
            messages with tensors may still go to any peer. None stands for all.
        secret: of the job; where there is one, tcp connections are authenticated and encrypted. It excludes
            ``allow_insecure``.
        plain_data: with a secret, tensors may travel over tcp in plain text; control messages never do.

    Raises:
        ConfigError: for a secret with ``allow_insecure``.
    """

    rank: int
    peers: tuple[int, ...]
    run_id: str
    rendezvous: Rendezvous
    restart: int = 0
    single_host: bool = True
    queue_bytes: int = DEFAULT_QUEUE_BYTES
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    allow_insecure: bool = False
    connect_timeout_s: float = timeouts.CONNECT_S
    heartbeat_s: float = timeouts.HEARTBEAT_S
    patience_s: float = timeouts.PATIENCE_S
    copies: DeviceCopies | None = None
    data_peers: tuple[int, ...] | None = None
    secret: Secret | None = None
    plain_data: bool = False

    def __post_init__(self) -> None:
        check_security(self.secret, allow_insecure=self.allow_insecure)

    @property
    def tensor_peers(self) -> tuple[int, ...]:
        """The peers with which tensors are exchanged: all, or those of ``data_peers``."""
        return self.peers if self.data_peers is None else tuple(peer for peer in self.peers if peer in self.data_peers)


@dataclass(frozen=True, slots=True)
class TransportStatistics:
    """A snapshot of a transport's counters since ``start``.

    Attributes:
        messages_sent: messages that ``send`` accepted, all channels.
        bytes_sent: their tensor bytes.
        messages_received: messages that ``receive`` returned.
        bytes_received: their tensor bytes.
        queued_bytes: tensor bytes accepted and not yet handed to the operating system or the peer.
        dropped_frames: bad frames of peers dropped.
        strangers: frames and connections of others that were dropped; ``receive`` raises nothing for them.
    """

    messages_sent: int = 0
    bytes_sent: int = 0
    messages_received: int = 0
    bytes_received: int = 0
    queued_bytes: int = 0
    dropped_frames: int = 0
    strangers: int = 0


class Transport(ABC):
    """One rank's end of the connections to its peers. The module's docstring is the contract.

    Args:
        context: this rank, its peers and the limits.

    Attributes:
        carries: kinds of devices whose tensors it sends and receives as they are. For a rank whose device is of another
            kind, RRFP copies tensors through host memory in front of the transport, which then sees CPU tensors only.
    """

    carries: frozenset[str] = frozenset({"cpu"})

    def __init__(self, context: TransportContext) -> None:
        self.context = context

    @abstractmethod
    async def start(self) -> None:
        """Connect to every peer; returns when messages can flow both ways. Cancelled or failed, it frees everything.

        Raises:
            TransportError: if a peer did not connect within ``connect_timeout_s``; names it.
            TransportClosedError: if the transport was started before, or is closed meanwhile.
            ConfigError: if the endpoint is not allowed.
        """

    @abstractmethod
    async def send(self, peer: int, message: Message) -> None:
        """Queue a message; returns when its tensors are no longer read, which is not delivery.

        Waits while ``queue_bytes`` are queued for this peer and channel. Cancelled, it has sent the whole message or
        nothing of it.

        Args:
            peer: one of the context's peers.
            message: its ``sequence`` and ``sender`` are set on the way. Its tensors belong to the transport until this
                returns, and to the caller afterwards.

        Raises:
            PeerLostError: the peer is gone.
            TransportClosedError: this end is closed.
            ConfigError: unknown peer, a tensor or body that cannot be sent, or more than ``max_message_bytes``.
        """

    @abstractmethod
    async def receive(self) -> Message:
        """Wait for the next message of any peer. Cancelling loses nothing.

        Returns:
            A message in the order of its channel. Its tensors share no memory with the sender's and are read-only by
            contract.

        Raises:
            PeerLostError: once for each lost peer, after its last message.
            FrameError: a bad frame was dropped; the next call returns the next message.
            TransportClosedError: this end is closed.
        """

    @abstractmethod
    async def close(self) -> None:
        """Deliver the accepted messages, notify the peers and free all resources. May be called twice."""

    @abstractmethod
    def abort(self) -> None:
        """Free all resources now and deliver nothing more. May be called twice, and never waits."""

    @abstractmethod
    def statistics(self) -> TransportStatistics:
        """The counters since ``start``; zeros before. Reads only; any thread may call it at any time."""


class Loan(Protocol):
    """Memory of a transport that one message's tensors may lie in; see `LendsMemory`."""

    @property
    def frames(self) -> Sequence[memoryview]:
        """One for each tensor, in order, writable and aligned to 64 bytes."""

    def close(self) -> None:
        """Give the memory back unless ``send`` has accepted it. It may still be written to. May be called twice."""


@runtime_checkable
class LendsMemory(Protocol):
    """A transport that need not copy tensors which lie in its own memory: an option, for copies from a device."""

    def lend(self, peer: int, channel: Channel, sizes: Sequence[int]) -> Loan | None:
        """Memory for the tensors of the next message of a peer and channel. At most one loan is open for each.

        ``send`` recognises tensors that lie in it, and copies the others beside them.

        Args:
            peer: one of the context's peers.
            channel: of the message.
            sizes: bytes of each tensor that is not None.

        Returns:
            The loan; None if the message would not lie in such memory, or ``send`` would refuse it.
        """


Deliver = Callable[[Message | RrfpError], None]
"""Takes a message, or an error that `receive` would raise. It raises nothing, and may close or abort the transport."""


@runtime_checkable
class DeliversMessages(Protocol):
    """A transport that can pass on messages where it reads them, instead of keeping them for `receive`."""

    def deliver_to(self, deliver: Deliver) -> None:
        """Pass on messages from now on; ``receive`` is not called any more. Called once, on the loop, after ``start``.

        Args:
            deliver: called on the loop and from no other callback than the transport's own: at once with each message
                and error that waits, later with each that comes. What is passed to it counts as received.

        Raises:
            TransportClosedError: this end is not started, or closed.
        """


@runtime_checkable
class SendsAtOnce(Protocol):
    """A transport that can send a small message without waiting."""

    def send_at_once(self, peer: int, message: Message) -> bool:
        """Send a message if nothing has to be waited for.

        Args:
            peer: one of the context's peers.
            message: as for ``send``.

        Returns:
            Whether the message was sent and its tensors are not read any more. If not, nothing of it was sent:
            ``send`` waits, or raises the error.
        """


def delivering(transport: Transport) -> DeliversMessages | None:
    """``transport``, if it offers `DeliversMessages.deliver_to` beside its own ``receive``."""
    return transport if isinstance(transport, DeliversMessages) and _fits(transport, "deliver_to", "receive") else None


def sending_at_once(transport: Transport) -> SendsAtOnce | None:
    """``transport``, if it offers `SendsAtOnce.send_at_once` beside its own ``send``."""
    return transport if isinstance(transport, SendsAtOnce) and _fits(transport, "send_at_once", "send") else None


def _fits(transport: object, shortcut: str, method: str) -> bool:
    """Whether no class derived from the one with ``shortcut`` replaces ``method`` alone."""
    # It may change ``send`` or ``receive`` alone, to delay or count messages, and a shortcut would bypass that.
    classes = type(transport).__mro__
    defined = [next((i for i, each in enumerate(classes) if name in vars(each)), -1) for name in (shortcut, method)]
    return defined[0] <= defined[1]
