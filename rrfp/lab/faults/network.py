"""The links between simulated ranks: FIFO channels with latency, and what a fault plan does to single messages.

A channel is one kind of message from one rank to another. Without faults each is a FIFO: a message arrives at
max(arrival of the one before, now + latency). The network knows messages and time, and no cores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from rrfp.arbiter.coordination import GroupMessage, GroupMessageKind
from rrfp.core.events import Claimed, Consumed, Granted, Offered
from rrfp.lab.cluster.cluster import ClaimMessage, Content, Envelope
from rrfp.lab.faults.faults import (
    AnyId,
    Channel,
    ClaimMessageId,
    ClaimSort,
    Delay,
    Duplicate,
    Fault,
    GroupMessageId,
    Lose,
    MessageFault,
    MessageId,
    Spike,
    Swap,
)
from rrfp.model.tasks import StepId


class Parcel(NamedTuple):
    """A message on its way."""

    # Its number is its index, from 0, among the messages of its channel in its step. One that travels elsewhere than
    # between bare cores has no packet.

    id: AnyId
    number: int
    packet: Envelope | None = None
    #: The value of the output in it.
    value: int = 0

    @property
    def content(self) -> Content:
        assert self.packet is not None, f"{self.id} has no content"
        return self.packet.content

    @property
    def step(self) -> StepId:
        """The sender's step."""
        return self.content.step


_CLAIM_SORTS: Mapping[type, ClaimSort] = {Offered: "offer", Claimed: "claim", Granted: "grant"}


def identity_of(packet: Envelope) -> AnyId:
    sender, receiver, content = packet
    number = content.step.number
    if isinstance(content, ClaimMessage):
        return ClaimMessageId(number, _CLAIM_SORTS[type(content)], content.task, sender, receiver)
    if not isinstance(content, GroupMessage):
        return MessageId(number, content.task, sender, receiver, isinstance(content, Consumed))
    is_report = content.kind in (GroupMessageKind.READY, GroupMessageKind.HELD)
    about = content.task if is_report else content.numbers[0]
    assert about is not None, f"{content} is about nothing"
    return GroupMessageId(number, content.kind, about, sender, receiver)


class FaultyNetwork:
    """Every link of one run, with spikes and faults of messages."""

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        #: Messages, or copies, that are kept back: by `Swap` until the next of their channel is sent, by
        #: `Delay` until their receiver opens a later step.
        self.kept: list[tuple[MessageFault, Parcel]] = []
        #: All that was sent, and when.
        self.sent: list[tuple[float, AnyId]] = []
        self.lost: list[AnyId] = []
        #: The faults that have had their chance.
        self.applied: list[Fault] = []
        self._spikes = [fault for fault in faults if isinstance(fault, Spike)]
        self._hits = {fault.message: fault for fault in faults if isinstance(fault, MessageFault)}
        #: When the last message of a channel arrives.
        self._last: dict[Channel, float] = {}
        #: The number of the next message of a channel in a step.
        self._next_numbers: dict[tuple[int, Channel], int] = {}

    def next_number(self, message: AnyId) -> int:
        key = (message.step, message.channel)
        number = self._next_numbers.get(key, 0)
        self._next_numbers[key] = number + 1
        return number

    def send(self, parcel: Parcel, now: float, latency: float) -> list[tuple[float, Parcel]]:
        """Send ``parcel``, for ``latency`` seconds but for spikes; returns arrivals."""
        self.sent.append((now, parcel.id))
        channel = parcel.id.channel
        for spike in self._spikes:
            if channel[:2] == (spike.sender, spike.receiver) and spike.start <= now < spike.end:
                latency += spike.extra
                self._note(spike)
        fault = self._hits.get(parcel.id)
        if fault is not None:
            self._note(fault)
        if isinstance(fault, Lose):
            self.lost.append(parcel.id)
            return []
        if isinstance(fault, Swap | Delay):
            self.kept.append((fault, parcel))
            if not (isinstance(fault, Delay) and fault.is_copy):
                return []
        arrival = self._last[channel] = max(self._last.get(channel, 0.0), now + latency)
        arrivals = [(arrival, parcel)]
        if isinstance(fault, Duplicate):
            arrivals.append((arrival + fault.lag, parcel))
        swapped = self.release(lambda fault, other: isinstance(fault, Swap) and other.id.channel == channel)
        return arrivals + [(arrival, other) for other in swapped]

    def step_opened(self, rank: int, step: int) -> list[Parcel]:
        """What was kept for ``step`` of ``rank``, or a later one, arrives."""
        return self.release(
            lambda fault, parcel: isinstance(fault, Delay) and parcel.id.receiver == rank and parcel.id.step < step
        )

    def flush(self) -> list[Parcel]:
        """Nothing else can happen: whatever is kept arrives, what was swapped first."""
        return self.release(lambda fault, _: isinstance(fault, Swap)) + self.release(lambda *_: True)

    def release(self, is_due: Callable[[MessageFault, Parcel], bool]) -> list[Parcel]:
        """What is kept back no longer, in the order of sending."""
        due = [parcel for fault, parcel in self.kept if is_due(fault, parcel)]
        self.kept = [(fault, parcel) for fault, parcel in self.kept if not is_due(fault, parcel)]
        return due

    def _note(self, fault: Fault) -> None:
        if fault not in self.applied:
            self.applied.append(fault)
