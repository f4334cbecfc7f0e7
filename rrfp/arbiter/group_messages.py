"""The messages inside a group, by which all its ranks run the same tasks in the same order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from rrfp.model.tasks import StepId, Task


class GroupMessageKind(StrEnum):
    """The meaning of a message."""

    READY = "ready"  # to the leader: all that `task` needs from other stages has arrived here
    HELD = "held"  # to the leader: bytes that `task` has left behind here; `numbers`: held, output
    ORDER = "order"  # from the leader: entry numbers[0] of the log is `task`
    PROPOSE = "propose"  # agreement, to member 0: in round numbers[0] this rank would run `task`
    OUTCOME = "outcome"  # agreement, from there: round numbers[0] chose `task`; None: the ranks did not agree
    PROMPT = "prompt"  # agreement, from there: round numbers[0] is open again, propose


@dataclass(frozen=True, slots=True)
class GroupMessage:
    """One message inside a group."""

    kind: GroupMessageKind
    #: The sender's step.
    step: StepId
    task: Task | None = None
    #: See `GroupMessageKind`.
    numbers: tuple[int, ...] = ()


#: Sends a message to a member of this rank's group.
SendToMember = Callable[[int, GroupMessage], None]
