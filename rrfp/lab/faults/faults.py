"""What can go wrong in one run, as data: rank faults, and message faults that break the transport's contract.

A plan says which message or rank is hit and how; it knows neither cores, clocks nor transports, so the same plan can be
applied to simulated cores and to a transport. Times are seconds of virtual time from the start of the run.

A transport promises that each channel of a peer is a FIFO that delivers every message once (`rrfp.transports.base`).
`Spike`, `Pause` and `Death` keep that promise. `Lose`, `Duplicate`, `Swap` and `Delay` break it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rrfp.arbiter.coordination import GroupMessageKind
from rrfp.lab.cluster.ranks import name_of_rank
from rrfp.model.tasks import Task

#: A FIFO: sender, receiver, and what travels there: "F", "B", "credit", "claims" or "group".
Channel = tuple[int, int, str]


@dataclass(frozen=True, slots=True)
class MessageId:
    """One message between two stages. Every one that a run without faults sends has exactly one."""

    #: Number of the step that it belongs to.
    step: int
    #: The task whose output it carries, or, for a credit, whose output was consumed.
    task: Task
    #: The rank that sends it; the stage where each has one rank.
    sender: int
    receiver: int
    #: a `Consumed` of a forward-only step; else it carries an output.
    is_credit: bool = False

    @property
    def channel(self) -> Channel:
        """The FIFO that it travels in."""
        return self.sender, self.receiver, "credit" if self.is_credit else self.task.kind

    @property
    def sort(self) -> str:
        """What it is, where it is no output."""
        return "credit" if self.is_credit else ""

    def __str__(self) -> str:
        what = f"the credit for {self.task}" if self.is_credit else str(self.task)
        return f"{what} {_way(self.sender, self.receiver)} in step {self.step}"


@dataclass(frozen=True, slots=True)
class GroupMessageId:
    """One message inside a group."""

    #: Number of the step that it belongs to.
    step: int
    kind: GroupMessageKind
    #: The entry of the log, the task that is reported, or the round.
    about: int | Task
    sender: int
    receiver: int

    @property
    def channel(self) -> Channel:
        return self.sender, self.receiver, "group"

    @property
    def sort(self) -> str:
        return _SORTS[self.kind]

    def __str__(self) -> str:
        return f"{self.sort} {self.about} {_way(self.sender, self.receiver)} in step {self.step}"


#: What a message says of a forward.
ClaimSort = Literal["offer", "claim", "grant"]


@dataclass(frozen=True, slots=True)
class ClaimMessageId:
    """One message by which replicas share forwards."""

    #: Number of the step that it belongs to.
    step: int
    sort: ClaimSort
    #: The forward.
    about: Task
    sender: int
    receiver: int

    @property
    def channel(self) -> Channel:
        return self.sender, self.receiver, "claims"

    def __str__(self) -> str:
        return f"{self.sort} {self.about} {_way(self.sender, self.receiver)} in step {self.step}"


AnyId = MessageId | GroupMessageId | ClaimMessageId

_SORTS = {
    GroupMessageKind.READY: "report",
    GroupMessageKind.HELD: "bytes",
    GroupMessageKind.ORDER: "order",
    GroupMessageKind.PROPOSE: "proposal",
    GroupMessageKind.OUTCOME: "outcome",
    GroupMessageKind.PROMPT: "prompt",
}


def _way(sender: int, receiver: int) -> str:
    return f"from {name_of_rank(sender)} to {name_of_rank(receiver)}"


@dataclass(frozen=True, slots=True)
class Spike:
    """Messages from ``sender`` to ``receiver`` that leave in [start, end) travel ``extra`` seconds longer."""

    sender: int
    receiver: int
    start: float
    end: float
    extra: float

    def __str__(self) -> str:
        span = f"between {self.start:.3f} and {self.end:.3f} s"
        way = f"{name_of_rank(self.sender)} to {name_of_rank(self.receiver)}"
        return f"spike: {way} takes {self.extra:.3f} s longer {span}"


@dataclass(frozen=True, slots=True)
class Pause:
    """``rank`` takes in and decides nothing for ``seconds`` from ``start`` on; what reaches it queues up."""

    rank: int
    start: float
    seconds: float

    def __str__(self) -> str:
        return f"pause: {name_of_rank(self.rank)} stands still from {self.start:.3f} s for {self.seconds:.3f} s"


@dataclass(frozen=True, slots=True)
class Death:
    """``rank`` ends at ``at``; its peers learn of it ``detection`` seconds later, as from the transport."""

    rank: int
    at: float
    #: Seconds until a transport notices.
    detection: float
    #: Whether its messages on their way are gone with it.
    drops: bool

    def __str__(self) -> str:
        fate = "lost" if self.drops else "delivered"
        return (
            f"death: {name_of_rank(self.rank)} dies at {self.at:.3f} s, its messages on their way are {fate}, "
            f"noticed {self.detection:.3f} s later"
        )


@dataclass(frozen=True, slots=True)
class Lose:
    """``message`` never arrives."""

    message: AnyId

    def __str__(self) -> str:
        return f"lose: {self.message}"


@dataclass(frozen=True, slots=True)
class Duplicate:
    """``message`` arrives a second time, ``lag`` seconds after the first."""

    message: AnyId
    lag: float

    def __str__(self) -> str:
        return f"duplicate: {self.message}, the copy {self.lag:.3f} s behind"


@dataclass(frozen=True, slots=True)
class Swap:
    """``message`` changes places with the next one of its channel. Where none follows, it arrives late and alone."""

    message: AnyId

    def __str__(self) -> str:
        return f"swap: {self.message}, with the next of its channel"


@dataclass(frozen=True, slots=True)
class Delay:
    """``message`` is kept back until its receiver is in a later step, and arrives then.

    A receiver does not end a step without the messages of that step, so the message itself arrives, overtaken by all
    others of its channel, once nothing else can happen. A stale copy does arrive in the later step.
    """

    message: AnyId
    #: The message arrives in time as well, and what comes late is a copy.
    is_copy: bool

    def __str__(self) -> str:
        return f"delay: {'a copy of ' if self.is_copy else ''}{self.message}, into a later step"


MessageFault = Lose | Duplicate | Swap | Delay
Fault = Spike | Pause | Death | MessageFault


def name_of(fault: Fault) -> str:
    """The name of a kind of fault: "spike", "lose", "delay copy"."""
    name = type(fault).__name__.lower()
    if isinstance(fault, Delay) and fault.is_copy:
        name += " copy"
    return f"{name} {fault.message.sort}".rstrip() if isinstance(fault, MessageFault) else name
