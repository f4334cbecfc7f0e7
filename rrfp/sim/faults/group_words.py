"""Which words of a group keep the contract as one rank takes them in, and which its core or arbiter must refuse.

Entries of the log and what is said in rounds come in order, each once. Reports name their task and are in no order, but
come once.
"""

from __future__ import annotations

from dataclasses import dataclass

from rrfp.arbiter.group_messages import Saying, Word
from rrfp.core.tasks import StepId
from rrfp.sim.faults.network import Parcel
from rrfp.sim.faults.ranks import Rank

#: What is said to a core, which keeps what comes a step early; the rest is said to `AgreementArbiter`.
TO_CORES = frozenset({Saying.READY, Saying.HELD, Saying.ORDER})


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


class WordWitness:
    """Watches what one rank hears from its group in its current step."""

    def __init__(self) -> None:
        self._due: dict[Rank | int, int] = {}
        self._told: set[tuple[Saying, object, int]] = set()

    def open(self) -> None:
        """A step begins."""
        self._due, self._told = {}, set()

    def arrive(self, parcel: Parcel, step: StepId | None, *, is_over: bool) -> Breach | None:
        """A word reaches the rank in ``step``; returns how it breaks the contract, if it does."""
        word = parcel.word
        assert word is not None
        if word.saying is Saying.HELD and step is not None and parcel.step.number < step.number + is_over:
            return None  # no task waits for the last of these, so the leader may have ended their step
        if parcel.step != step or (is_over and word.saying in TO_CORES):
            named = (str(word.task), str(parcel.step.number)) if word.saying in TO_CORES else (_member(parcel),)
            return Breach(parcel, "belongs to another step", named)
        return self._repeated(parcel, word) if word.saying in (Saying.READY, Saying.HELD) else self._numbered(parcel)

    def _repeated(self, parcel: Parcel, word: Word) -> Breach | None:
        key = word.saying, word.task, int(parcel.id.sender)
        if key in self._told:
            return Breach(parcel, "arrived twice", (str(word.task), "twice"))
        self._told.add(key)
        return None

    def _numbered(self, parcel: Parcel) -> Breach | None:
        sender, word = parcel.id.sender, parcel.word
        assert word is not None
        due = self._due.get(sender, 0)
        self._due[sender] = max(due, parcel.place + 1)
        if parcel.place == due:
            return None
        is_order = word.saying is Saying.ORDER
        named = (str(word.task), f"entry {parcel.place}", f"expected {due}") if is_order else (_member(parcel),)
        if parcel.place < due:
            return Breach(parcel, "arrived twice", named)
        return Breach(parcel, "overtook another message, or that was lost", named)


def _member(parcel: Parcel) -> str:
    """How `AgreementArbiter` calls the sender, and what it must say that it said."""
    sender = parcel.id.sender
    return f"member {sender.member if isinstance(sender, Rank) else 0} of the group"
