"""The links between simulated ranks: FIFO channels with latency, and what a fault plan does to single messages.

A channel is one kind of message from one rank to another. Without faults each is a FIFO: a message arrives at
max(arrival of the one before, now + latency). The network knows messages and time, and no cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rrfp.arbiter.group_messages import GroupMessage, GroupMessageKind
from rrfp.core.events import Consumed
from rrfp.core.tasks import StepId
from rrfp.sim.cluster.cluster import Content, Packet
from rrfp.sim.faults.faults import (
    AnyId,
    Channel,
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


class Parcel(NamedTuple):
    """A message on its way.

    Attributes:
        id: which message.
        step: the sender's step.
        number: its index, from 0, among the messages of its channel in its step.
        content: its content; None where the sender has no use for it.
        value: of the output in it.
    """

    id: AnyId
    step: StepId
    number: int
    content: Content | None = None
    value: int = 0


def identity_of(packet: Packet) -> AnyId:
    """Which message of the run ``packet`` is."""
    sender, receiver, content = packet
    number = content.step.number
    if not isinstance(content, GroupMessage):
        return MessageId(number, content.task, sender, receiver, isinstance(content, Consumed))
    is_report = content.kind in (GroupMessageKind.READY, GroupMessageKind.HELD)
    about = content.task if is_report else content.numbers[0]
    assert about is not None, f"{content} is about nothing"
    return GroupMessageId(number, content.kind, about, sender, receiver)


class Delivery(NamedTuple):
    """A message, and when it arrives, in seconds."""

    time: float
    parcel: Parcel


class Network:
    """Every link of one run.

    Args:
        faults: what goes wrong; faults of ranks other than spikes are none of its business.
    """

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        self._spikes = [fault for fault in faults if isinstance(fault, Spike)]
        self._hits = {fault.message: fault for fault in faults if isinstance(fault, MessageFault)}
        #: When the last message of a channel arrives.
        self._last: dict[Channel, float] = {}
        #: The number of the next message of a channel in a step.
        self._next_numbers: dict[tuple[int, Channel], int] = {}
        #: Messages that change places with the next one of their channel.
        self._swapped: list[Parcel] = []
        #: Messages, or copies, that are kept for a later step of their receiver.
        self._late: list[Parcel] = []
        #: Messages that never arrive, and the faults that have had their chance.
        self.lost: list[AnyId] = []
        self.applied: list[Fault] = []

    def next_number(self, message: AnyId) -> int:
        """The number of ``message``, which is about to be sent, in its channel and step."""
        key = (message.step, message.channel)
        number = self._next_numbers.get(key, 0)
        self._next_numbers[key] = number + 1
        return number

    def send(self, parcel: Parcel, now: float, latency: float) -> list[Delivery]:
        """A rank sends ``parcel`` at ``now``; returns every arrival that is certain now.

        Args:
            parcel: the message.
            now: the time, in seconds.
            latency: how long it travels, in seconds, without any spike.
        """
        channel = parcel.id.channel
        for spike in self._spikes:
            if channel[:2] == (spike.sender, spike.receiver) and spike.start <= now < spike.end:
                latency += spike.extra
                self._note(spike)
        fault = self._hits.get(parcel.id)
        if isinstance(fault, Lose | Swap) or (isinstance(fault, Delay) and not fault.is_copy):
            self._keep(fault, parcel)
            return []
        arrival = self._last[channel] = max(self._last.get(channel, 0.0), now + latency)
        deliveries = [Delivery(arrival, parcel)]
        if isinstance(fault, Duplicate):
            self._note(fault)
            deliveries.append(Delivery(arrival + fault.lag, parcel))
        elif isinstance(fault, Delay):
            self._keep(fault, parcel)
        deliveries += [Delivery(arrival, other) for other in self._pop(self._swapped, channel)]
        return deliveries

    def step_opened(self, rank: int, step: int, now: float) -> list[Delivery]:
        """``rank`` opened step ``step``: what was kept for a later step of it arrives."""
        due = [parcel for parcel in self._late if parcel.id.receiver == rank and parcel.id.step < step]
        self._late = [parcel for parcel in self._late if parcel not in due]
        return [Delivery(now, parcel) for parcel in due]

    def keeps(self, message: AnyId) -> bool:
        """Whether ``message``, or a copy of it, is kept back."""
        return any(parcel.id == message for parcel in (*self._swapped, *self._late))

    def release(self, message: AnyId, now: float) -> list[Delivery]:
        """``message`` arrives if it is kept back."""
        kept = [parcel for parcel in (*self._swapped, *self._late) if parcel.id == message]
        self._swapped = [parcel for parcel in self._swapped if parcel.id != message]
        self._late = [parcel for parcel in self._late if parcel.id != message]
        return [Delivery(now, parcel) for parcel in kept]

    def flush(self, now: float) -> list[Delivery]:
        """Nothing else can happen: whatever is kept arrives."""
        kept = [*self._swapped, *self._late]
        self._swapped, self._late = [], []
        return [Delivery(now, parcel) for parcel in kept]

    def _keep(self, fault: MessageFault, parcel: Parcel) -> None:
        self._note(fault)
        if isinstance(fault, Lose):
            self.lost.append(parcel.id)
        else:
            (self._swapped if isinstance(fault, Swap) else self._late).append(parcel)

    def _note(self, fault: Fault) -> None:
        if fault not in self.applied:
            self.applied.append(fault)

    @staticmethod
    def _pop(kept: list[Parcel], channel: Channel) -> Iterator[Parcel]:
        for parcel in [parcel for parcel in kept if parcel.id.channel == channel]:
            kept.remove(parcel)
            yield parcel
