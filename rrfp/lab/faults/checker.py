"""How a run with faults must end, by the contracts alone; the checkers of its ranks watch the way there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from rrfp.arbiter.coordination import GroupMessage, GroupMessageKind
from rrfp.core import events as ev
from rrfp.lab.cluster.ranks import Rank, stage_of_rank
from rrfp.lab.faults.faults import AnyId, Channel, ClaimMessageId
from rrfp.lab.faults.network import Parcel
from rrfp.model.tasks import StepId

#: Reports of a follower; with the log they are for a core, the other messages of a group for its `AgreementArbiter`.
_REPORTS = frozenset({GroupMessageKind.READY, GroupMessageKind.HELD})


@dataclass(frozen=True, slots=True)
class ContractViolation:
    """How a message breaks the contract, and what a refusal must name."""

    parcel: Parcel
    how: str
    words: tuple[str, ...]


class MessageChecker:
    """Which messages keep the transport's contract as one rank receives them, by the contract alone.

    Entries of the log and messages of rounds of agreement come in order, each once. Outputs, credits, reports and what
    replicas say to share forwards name their task and come once, and in no order but that a grant follows its offer.
    """

    def __init__(self) -> None:
        self._step: StepId | None = None
        self._is_over = True
        self._early: list[Parcel] = []
        self._due: dict[Channel, int] = {}
        self._seen: set[AnyId] = set()

    def open_step(self, step: StepId) -> tuple[ContractViolation | None, ContractViolation | None]:
        """What came early counts; returns the first breach for arbiter and core."""
        self._step, self._is_over = step, False
        self._due, self._seen = {}, set()
        early, self._early = self._early, []
        first: dict[bool, ContractViolation] = {}
        for parcel in early:
            if breach := self.judge(parcel):
                first.setdefault(_is_for_core(parcel), breach)
        return first.get(False), first.get(True)

    def finish_step(self) -> None:
        self._is_over = True

    def is_early(self, parcel: Parcel) -> bool:
        """Whether ``parcel``, no answer to the rank, is for the next step."""
        content = parcel.content
        is_answer = isinstance(content, ev.Consumed)
        is_answer |= isinstance(content, GroupMessage) and content.kind is GroupMessageKind.HELD
        return parcel.step.number == (0 if self._step is None else self._step.number + 1) and not is_answer

    def judge(self, parcel: Parcel) -> ContractViolation | None:
        """How ``parcel`` breaks the contract as it reaches the rank, if so."""
        if self.is_early(parcel):
            self._early.append(parcel)
            return None
        if self._is_idle(parcel):
            return None
        if parcel.step != self._step or (self._is_over and _is_for_core(parcel)):
            return ContractViolation(parcel, "belongs to another step", _words(parcel, f"step {parcel.step.number}"))
        content = parcel.content
        if isinstance(content, GroupMessage) and content.kind not in _REPORTS:
            return self._out_of_order(parcel, content.kind)
        if isinstance(parcel.id, ClaimMessageId) and self._lacks_offer(parcel.id):
            words = (f"microbatch {parcel.id.about.microbatch}", "before it was offered")
            return ContractViolation(parcel, "overtook its offer, or that was lost", words)
        return self._repeated(parcel)

    def _is_idle(self, parcel: Parcel) -> bool:
        """Whether it reports bytes, or claims a forward, of a step that the rank has ended."""
        content, step = parcel.content, self._step
        is_of_bytes = isinstance(content, GroupMessage) and content.kind is GroupMessageKind.HELD
        may_be_late = is_of_bytes or isinstance(content, ev.Claimed)
        return may_be_late and step is not None and parcel.step.number < step.number + self._is_over

    def _lacks_offer(self, message: ClaimMessageId) -> bool:
        """Whether it grants a forward that has not been offered; those of the first stage need not be."""
        is_offered = message.sort == "grant" and message.about.virtual_stage > 0
        return is_offered and replace(message, sort="offer") not in self._seen

    def _repeated(self, parcel: Parcel) -> ContractViolation | None:
        if parcel.id not in self._seen:
            self._seen.add(parcel.id)
            return None
        if isinstance(parcel.id, ClaimMessageId):
            return ContractViolation(parcel, "arrived twice", (f"microbatch {parcel.id.about.microbatch}",))
        is_credit = isinstance(parcel.content, ev.Consumed)
        return ContractViolation(parcel, "arrived twice", _words(parcel) if is_credit else (_task(parcel), "twice"))

    def _out_of_order(self, parcel: Parcel, kind: GroupMessageKind) -> ContractViolation | None:
        due = self._due.get(parcel.id.channel, 0)
        self._due[parcel.id.channel] = max(due, parcel.number + 1)
        if parcel.number == due:
            return None
        is_repeated = parcel.number < due
        words = _words(parcel)
        if kind is GroupMessageKind.ORDER:
            words = _task(parcel), f"entry {parcel.number}", f"expected {due}"
        return ContractViolation(
            parcel, "arrived twice" if is_repeated else "overtook another message, or that was lost", words
        )


def _is_for_core(parcel: Parcel) -> bool:
    """Whether a core gets it, or else an `AgreementArbiter`."""
    content = parcel.content
    return not isinstance(content, GroupMessage) or content.kind in _REPORTS or content.kind is GroupMessageKind.ORDER


def _task(parcel: Parcel) -> str:
    return str(parcel.content.task)


def _words(parcel: Parcel, *more: str) -> tuple[str, ...]:
    """What a refusal of ``parcel`` must say: task and sender, or member."""
    sender = parcel.id.sender
    if not _is_for_core(parcel):
        return (f"member {sender.member if isinstance(sender, Rank) else 0} of the group",)
    if isinstance(parcel.content, GroupMessage):
        return _task(parcel), *more
    return _task(parcel), f"stage {stage_of_rank(sender)}", *more


class Ending(StrEnum):
    """How a run ends."""

    FINISHED = "finished"  # every task ran once, on the right inputs
    REFUSED = "refused"  # a core raised ProtocolError, which names the message
    STALLED = "stalled"  # nothing can happen any longer; the report names the message and the stage that owes it
    ABORTED = "aborted"  # every living core received an abort that names the dead rank
    CRASHED = "crashed"  # an exception that is no ProtocolError, or events without end: always wrong
    UNFIT = "unfit"  # the hint said, by a ConfigError, that it is not made for this pipeline


_FINISHED = frozenset({Ending.FINISHED})
_REFUSED = frozenset({Ending.REFUSED})
_STALLED = frozenset({Ending.STALLED})

#: How a run with only this fault may end. Which of two it is, the rules below say for each run:
#: - lose order: refused if a later message of the log and step arrives, stalled if none does;
#: - swap, delay of an order itself: refused if a later one of the log and step overtakes it, else harmless;
#: - death: aborted, unless every stage had finished.
#: Activations, gradients, credits and a follower's reports name their task and are in no order: swapped or late ones
#: are harmless here, and transports refuse those that their sequence numbers show. Of the bytes
#: that a follower reports, the leader waits for those of a forward of a new signature; without others it counts too
#: little, and transports lose nothing.
#: The log and the rounds of an agreement are in order, and come to a stand at what is missing.
#: Of what replicas say to share forwards, a grant that comes before its offer is refused. Nobody waits for a claim
#: where another copy is given the forward, and one that comes after the step of the rank that has it is late as well.
REQUIRED: Mapping[str, frozenset[Ending]] = {
    "spike": _FINISHED,
    "pause": _FINISHED,
    "death": frozenset({Ending.ABORTED, Ending.FINISHED}),
    "lose": _STALLED,
    "lose credit": _STALLED,
    "lose order": _REFUSED | _STALLED,
    "lose report": _STALLED,
    "lose bytes": _FINISHED | _STALLED,
    "lose proposal": _STALLED,
    "lose outcome": _REFUSED | _STALLED,
    "lose offer": _REFUSED | _STALLED,
    "lose claim": _FINISHED | _STALLED,
    "lose grant": _STALLED,
    "duplicate": _REFUSED,
    "duplicate credit": _REFUSED,
    "duplicate order": _REFUSED,
    "duplicate report": _REFUSED,
    "duplicate bytes": _REFUSED | _FINISHED,
    "duplicate proposal": _REFUSED,
    "duplicate outcome": _REFUSED,
    "duplicate offer": _REFUSED,
    "duplicate claim": _REFUSED | _FINISHED,
    "duplicate grant": _REFUSED,
    "swap": _FINISHED,
    "swap credit": _FINISHED,
    "swap order": _REFUSED | _FINISHED,
    "swap report": _FINISHED,
    "swap bytes": _FINISHED,
    "swap proposal": _FINISHED,
    "swap outcome": _REFUSED | _FINISHED,
    "swap offer": _REFUSED | _FINISHED,
    "swap claim": _FINISHED,
    "swap grant": _FINISHED,
    "delay": _FINISHED,
    "delay credit": _FINISHED,
    "delay order": _REFUSED | _FINISHED,
    "delay report": _FINISHED,
    "delay bytes": _FINISHED,
    "delay proposal": _FINISHED,
    "delay outcome": _REFUSED | _FINISHED,
    "delay offer": _REFUSED | _FINISHED,
    "delay claim": _FINISHED,
    "delay grant": _FINISHED,
    "delay copy": _REFUSED,
    "delay copy credit": _REFUSED,
    "delay copy order": _REFUSED,
    "delay copy report": _REFUSED,
    "delay copy bytes": _FINISHED,
    "delay copy proposal": _REFUSED,
    "delay copy outcome": _REFUSED,
    "delay copy offer": _REFUSED,
    "delay copy claim": _FINISHED,
    "delay copy grant": _REFUSED,
}
