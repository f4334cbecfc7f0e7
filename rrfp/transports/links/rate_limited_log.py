"""Counts rejected connections and frames, and logs at most one a second: a flood must not fill the log as well."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import structlog

#: Seconds between two lines.
_PAUSE_S = 1.0


class RateLimitedLog:
    """Counts rejections, and logs one a second at most."""

    def __init__(self, log: structlog.stdlib.BoundLogger, clock: Callable[[], float] = time.monotonic) -> None:
        self.count = 0
        self._log = log
        self._clock = clock
        self._unlogged = 0
        self._next_s = -math.inf

    def add(self, sentence: str) -> None:
        """Something was refused; the sentence says it."""
        self.count += 1
        if (now_s := self._clock()) < self._next_s:
            self._unlogged += 1
            return
        self._next_s = now_s + _PAUSE_S
        others = f" ({self._unlogged} more since the last line)" if self._unlogged else ""
        self._unlogged = 0
        self._log.warning("%s%s", sentence, others)
