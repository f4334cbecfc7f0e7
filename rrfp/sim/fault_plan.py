"""What can go wrong in one run, as data: rank faults, and message faults that break the transport's contract.

A plan says which message or rank is hit and how; it knows neither cores, clocks nor transports, so the same plan can be
applied to simulated cores and to a transport. Times are seconds of virtual time from the start of the run.

A transport promises that each channel of a peer is a FIFO that delivers every message once (`rrfp.transports.base`).
`Spike`, `Pause` and `Death` keep that promise. `Lose`, `Duplicate`, `Swap` and `Delay` break it.
"""

from __future__ import annotations

from dataclasses import dataclass

from rrfp.core.tasks import Task


@dataclass(frozen=True, slots=True)
class MessageId:
    """One message of a run. Every message that a run without faults sends has exactly one.

    Attributes:
        step: number of the step that it belongs to.
        task: the task whose output it carries, or, for a credit, whose output was consumed.
        sender: the stage that sends it.
        receiver: the stage that it goes to.
        is_credit: a `Consumed` of a forward-only step; else it carries an output.
    """

    step: int
    task: Task
    sender: int
    receiver: int
    is_credit: bool = False

    @property
    def channel(self) -> tuple[int, int, str]:
        """The FIFO that it travels in: sender, receiver, and what travels there ("F", "B" or "credit")."""
        return self.sender, self.receiver, "credit" if self.is_credit else self.task.kind

    def __str__(self) -> str:
        what = f"the credit for {self.task}" if self.is_credit else str(self.task)
        return f"{what} from stage {self.sender} to stage {self.receiver} in step {self.step}"


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
        return f"spike: stage {self.sender} to stage {self.receiver} takes {self.extra:.3f} s longer {span}"


@dataclass(frozen=True, slots=True)
class Pause:
    """``stage`` takes in and decides nothing for ``seconds`` from ``start`` on; what reaches it queues up."""

    stage: int
    start: float
    seconds: float

    def __str__(self) -> str:
        return f"pause: stage {self.stage} stands still from {self.start:.3f} s for {self.seconds:.3f} s"


@dataclass(frozen=True, slots=True)
class Death:
    """``stage`` ends at ``at``; its peers learn of it ``detection`` seconds later, as the transport would tell them.

    Attributes:
        stage: the stage that ends.
        at: when.
        detection: seconds until a transport notices.
        drops: whether its messages on their way are gone with it.
    """

    stage: int
    at: float
    detection: float
    drops: bool

    def __str__(self) -> str:
        fate = "lost" if self.drops else "delivered"
        return (
            f"death: stage {self.stage} dies at {self.at:.3f} s, its messages on their way are {fate}, "
            f"noticed {self.detection:.3f} s later"
        )


@dataclass(frozen=True, slots=True)
class Lose:
    """``message`` never arrives."""

    message: MessageId

    def __str__(self) -> str:
        return f"lose: {self.message}"


@dataclass(frozen=True, slots=True)
class Duplicate:
    """``message`` arrives a second time, ``lag`` seconds after the first."""

    message: MessageId
    lag: float

    def __str__(self) -> str:
        return f"duplicate: {self.message}, the copy {self.lag:.3f} s behind"


@dataclass(frozen=True, slots=True)
class Swap:
    """``message`` changes places with the next one of its channel. Where none follows, it arrives late and alone."""

    message: MessageId

    def __str__(self) -> str:
        return f"swap: {self.message}, with the next of its channel"


@dataclass(frozen=True, slots=True)
class Delay:
    """``message`` is kept back until its receiver is in a later step, and arrives then.

    A receiver does not end a step without the messages of that step, so the message itself arrives, overtaken by all
    others of its channel, once nothing else can happen. A stale copy does arrive in the later step.

    Attributes:
        message: the message.
        is_copy: the message arrives in time as well, and what comes late is a copy.
    """

    message: MessageId
    is_copy: bool

    def __str__(self) -> str:
        return f"delay: {'a copy of ' if self.is_copy else ''}{self.message}, into a later step"


MessageFault = Lose | Duplicate | Swap | Delay
Fault = Spike | Pause | Death | MessageFault


def name_of(fault: Fault) -> str:
    """How a kind of fault is called: "spike", "lose", "delay copy", ...; "lose credit" where it hits a credit."""
    name = type(fault).__name__.lower()
    if isinstance(fault, Delay) and fault.is_copy:
        name += " copy"
    return f"{name} credit" if isinstance(fault, MessageFault) and fault.message.is_credit else name
