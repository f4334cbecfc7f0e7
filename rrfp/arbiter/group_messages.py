"""What the ranks of a group say to each other, so that they all run the same tasks in the same order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from rrfp.core.tasks import StepId, Task


class Saying(StrEnum):
    """What a word says."""

    READY = "ready"  # to the leader: all that `task` needs from other stages has arrived here
    HELD = "held"  # to the leader: bytes that `task` has left behind here; `numbers`: held, output
    ORDER = "order"  # from the leader: entry numbers[0] of the log is `task`
    PROPOSE = "propose"  # agreement, to rank 0 of the group: in round numbers[0] this rank would run `task`
    OUTCOME = "outcome"  # agreement, from there: round numbers[0] chose `task`; None: the ranks did not agree
    PROMPT = "prompt"  # agreement, from there: round numbers[0] is open again, propose


@dataclass(frozen=True, slots=True)
class Word:
    """One message inside a group.

    Attributes:
        saying: what it says.
        step: the sender's step.
        task: the task that it is about.
        numbers: see `Saying`.
    """

    saying: Saying
    step: StepId
    task: Task | None = None
    numbers: tuple[int, ...] = ()


#: Says a word to a member of this rank's group.
Say = Callable[[int, Word], None]
