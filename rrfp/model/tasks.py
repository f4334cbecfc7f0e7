"""Task identities, and their text form.

A task is one forward (F), backward (B; the input gradient only on a split virtual stage) or weight-gradient (W)
computation of one microbatch on one virtual stage. ``F3@5`` is the forward of microbatch 3 on virtual stage 5; the text
parses back.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final, NamedTuple

from rrfp.errors import ConfigError


class Kind(StrEnum):
    """The kind of a task."""

    F = "F"
    B = "B"
    W = "W"

    # Enum's own is written in Python, and every lookup of a task hashes its kind.
    __hash__ = str.__hash__


#: The kinds by themselves: until Python 3.12 looking a member up on its enum runs Python code.
F: Final = Kind.F
B: Final = Kind.B
W: Final = Kind.W


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
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ConfigError(f"task {text!r} is not of the form F3@5: F, B or W, microbatch, '@', virtual stage")
        return cls(Kind(match[1]), int(match[2]), int(match[3]))


_TEXT = re.compile(r"([FBW])(0|[1-9][0-9]*)@(0|[1-9][0-9]*)")


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
