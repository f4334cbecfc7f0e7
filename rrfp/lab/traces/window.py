"""The part of a step that a timeline shows."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rrfp.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TimeWindow:
    """From ``start`` to ``end``, seconds after the step's start; None is the step's end."""

    start: float = 0.0
    end: float | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.start) and self.start >= 0):
            raise ConfigError(f"from is {_text(self.start)}, must be 0 ms or more")
        if self.end is not None and not (math.isfinite(self.end) and self.end > self.start):
            raise ConfigError(f"to is {_text(self.end)}, must be more than from ({_text(self.start)})")

    @classmethod
    def of_milliseconds(cls, start: float | None, end: float | None) -> TimeWindow:
        """The window between two times, each None where it is the step's own."""
        return cls(0.0 if start is None else start / 1e3, None if end is None else end / 1e3)

    @property
    def is_whole(self) -> bool:
        """Whether it shows the whole step."""
        return self.start == 0 and self.end is None

    def within(self, span: float) -> tuple[float, float]:
        """Start and end of the part of a step of ``span`` seconds."""
        if self.start > 0 and self.start >= span:
            raise ConfigError(f"from is {_text(self.start)}, must be less than the step's {_text(span)}")
        return self.start, span if self.end is None else min(self.end, span)


WHOLE = TimeWindow()


def _text(seconds: float) -> str:
    return f"{seconds * 1e3:.6g} ms"
