"""Task identities, their text form, and the one table of their kinds.

A task is one forward (F), backward (B; the input gradient only on a split virtual stage) or weight-gradient (W)
computation of one microbatch on one virtual stage. ``F3@5`` is the forward of microbatch 3 on virtual stage 5; the text
parses back.

`KINDS` has what sets kinds apart. The graph, the core, the engine, traces and pictures read it there, so a further kind
is a row, and the code that computes it; docs/architecture.md has what else it takes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Final, NamedTuple

from rrfp.errors import ConfigError


class Kind(StrEnum):
    """The kind of a task. Members are in the order in which a microbatch runs them on a virtual stage."""

    F = "F"
    B = "B"
    W = "W"

    # Enum's own is written in Python, and every lookup of a task hashes its kind.
    __hash__ = str.__hash__


#: The kinds by themselves: until Python 3.12 looking a member up on its enum runs Python code.
F: Final = Kind.F
B: Final = Kind.B
W: Final = Kind.W


class Side(Enum):
    """Virtual stages around one, along the edges of the graph."""

    BEFORE = "before"
    HERE = "here"
    AFTER = "after"


#: The other way along the edges.
OPPOSITE: Final = {Side.BEFORE: Side.AFTER, Side.HERE: Side.HERE, Side.AFTER: Side.BEFORE}


@dataclass(frozen=True, slots=True)
class TaskKind:
    """What sets one kind of task apart: a row of `KINDS`."""

    #: The method of `StageProgram` that computes it, and its times in a cost table.
    name: str
    #: For people: in tables, traces and pictures, where it has this colour. Colours are distinct for all common colour
    #: blindnesses and in grey: dark, light, middle.
    label: str
    colour: str
    #: What its tasks read: outputs of which kind, from where.
    reads: tuple[tuple[Kind, Side], ...]
    #: Whether forward-only steps have it.
    in_evaluation: bool = False
    #: Whether it begins the work on a microbatch: takes a slot, which the last kind of a virtual stage frees.
    takes_slot: bool = False
    #: The field of `TaskGraph` that says which virtual stages run it; None: all do.
    option: str | None = None


#: The kinds, in the order in which a microbatch runs them on a virtual stage.
KINDS: Final[Mapping[Kind, TaskKind]] = {
    F: TaskKind("forward", "forward", "#2f6db5", ((F, Side.BEFORE),), in_evaluation=True, takes_slot=True),
    B: TaskKind("backward", "backward", "#f5b041", ((F, Side.HERE), (B, Side.AFTER))),
    W: TaskKind("weight", "weight gradient", "#4fa58c", ((B, Side.HERE),), option="split"),
}
_READ = [read for row in KINDS.values() for read in row.reads]
#: Where outputs travel to other virtual stages: against the way by which these read them.
SENT_TO: Final[Mapping[Kind, Side]] = {kind: OPPOSITE[side] for kind, side in _READ if side is not Side.HERE}
#: Kinds that no other virtual stage waits for.
LOCAL_KINDS: Final = tuple(kind for kind in KINDS if kind not in SENT_TO)
#: Kinds that no task waits for: they end the work on a microbatch, and free its memory.
ENDING_KINDS: Final = tuple(kind for kind in KINDS if kind not in dict(_READ))


class Mode(StrEnum):
    """The mode of a step: training (F, B, W) or forward only."""

    TRAIN = "train"
    FORWARD = "forward"


class Task(NamedTuple):
    """One unit of compute. Ordered by kind text, then microbatch, then virtual stage; hashable; prints as ``F3@5``."""

    kind: Kind
    microbatch: int
    virtual_stage: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}@{self.virtual_stage}"

    @classmethod
    def parse(cls, text: str) -> Task:
        """Read the text form back.

        Args:
            text: such as ``F3@5``.

        Raises:
            ConfigError: if ``text`` is not of the form ``F3@5``.
        """
        match = _TEXT.fullmatch(str(text))
        if match is None:
            *others, last = Kind
            kinds = f"{', '.join(others)} or {last}"
            raise ConfigError(f"task {text!r} is not of the form F3@5: {kinds}, microbatch, '@', virtual stage")
        return cls(Kind(match[1]), int(match[2]), int(match[3]))


_TEXT = re.compile(rf"([{''.join(Kind)}])(0|[1-9][0-9]*)@(0|[1-9][0-9]*)")


class StepId(NamedTuple):
    """What all ranks must agree on about a step; it travels in every message header.

    Attributes:
        number: 0 for the first step of a pipeline, training and forward-only steps counted together.
        mode: training or forward only.
        microbatches: M, at least 1.
    """

    number: int
    mode: Mode
    microbatches: int

    def __str__(self) -> str:
        return f"step {self.number} ({self.mode}, {self.microbatches} microbatches)"
