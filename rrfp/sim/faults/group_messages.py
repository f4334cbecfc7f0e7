"""Which messages inside a group keep the contract as one rank takes them in, and which its core or arbiter must refuse.

Entries of the log and what is said in rounds come in order, each once. Reports name their task and are in no order, but
come once.
"""

from __future__ import annotations

from dataclasses import dataclass

from rrfp.arbiter.group_messages import GroupMessage, GroupMessageKind
from rrfp.core.tasks import StepId
from rrfp.sim.cluster.ranks import Rank
from rrfp.sim.faults.network import Parcel

#: Messages for a core, which keeps what comes a step early; the others are for `AgreementArbiter`.
TO_CORES = frozenset({GroupMessageKind.READY, GroupMessageKind.HELD, GroupMessageKind.ORDER})


@dataclass(frozen=True, slots=True)
class Breach:
    """A message that breaks the transport's contract as its receiver takes it in. It must be refused.

    Attributes:
        parcel: the message.
        how: in what way.
        words: what the refusal must name.
    """

    parcel: Parcel
    how: str
    words: tuple[str, ...]


class GroupMessageChecker:
    """Judges what one rank receives from its group in its current step."""

    def __init__(self) -> None:
        self._due: dict[Rank | int, int] = {}
        self._reported: set[tuple[GroupMessageKind, object, int]] = set()

    def open(self) -> None:
        """A step begins."""
        self._due, self._reported = {}, set()

    def judge(self, parcel: Parcel, step: StepId | None, *, is_over: bool) -> Breach | None:
        """A message reaches the rank in ``step``; returns how it breaks the contract, if it does."""
        message = parcel.content
        assert isinstance(message, GroupMessage)
        if message.kind is GroupMessageKind.HELD and step is not None and parcel.step.number < step.number + is_over:
            return None  # no task waits for the last of these, so the leader may have ended their step
        if parcel.step != step or (is_over and message.kind in TO_CORES):
            named = (str(message.task), str(parcel.step.number)) if message.kind in TO_CORES else (_member(parcel),)
            return Breach(parcel, "belongs to another step", named)
        return (
            self._repeated(parcel, message)
            if message.kind in (GroupMessageKind.READY, GroupMessageKind.HELD)
            else self._numbered(parcel)
        )

    def _repeated(self, parcel: Parcel, message: GroupMessage) -> Breach | None:
        key = message.kind, message.task, int(parcel.id.sender)
        if key in self._reported:
            return Breach(parcel, "arrived twice", (str(message.task), "twice"))
        self._reported.add(key)
        return None

    def _numbered(self, parcel: Parcel) -> Breach | None:
        sender, message = parcel.id.sender, parcel.content
        assert isinstance(message, GroupMessage)
        due = self._due.get(sender, 0)
        self._due[sender] = max(due, parcel.number + 1)
        if parcel.number == due:
            return None
        is_order = message.kind is GroupMessageKind.ORDER
        named = (str(message.task), f"entry {parcel.number}", f"expected {due}") if is_order else (_member(parcel),)
        if parcel.number < due:
            return Breach(parcel, "arrived twice", named)
        return Breach(parcel, "overtook another message, or that was lost", named)


def _member(parcel: Parcel) -> str:
    """How `AgreementArbiter` calls the sender."""
    sender = parcel.id.sender
    return f"member {sender.member if isinstance(sender, Rank) else 0} of the group"
