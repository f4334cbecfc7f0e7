"""Loggers: structured events on the standard library's loggers under ``rrfp``.

A library must not configure logging for the whole program. So each logger has its own processors, and passes the
sentence to `logging` with its fields as attributes of the record: plain formatters print the sentence, structured ones
the fields too.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import cast

import structlog


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    logger = structlog.wrap_logger(
        logging.getLogger(name),
        wrapper_class=structlog.stdlib.BoundLogger,
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.stdlib.render_to_log_kwargs,
        ],
        context_class=dict,
        cache_logger_on_first_use=True,
    )
    return cast("structlog.stdlib.BoundLogger", logger)


#: Seconds between two lines of a `RateLimitedLog`.
_PAUSE_S = 1.0


class RateLimitedLog:
    """Counts rejections, and logs one a second at most: a flood must not fill the log as well."""

    def __init__(self, log: structlog.stdlib.BoundLogger, clock: Callable[[], float] = time.monotonic) -> None:
        self.count = 0
        self._log = log
        self._clock = clock
        self._unlogged = 0
        self._next_s = -math.inf

    def add(self, sentence: str) -> None:
        self.count += 1
        if (now_s := self._clock()) < self._next_s:
            self._unlogged += 1
            return
        self._next_s = now_s + _PAUSE_S
        others = f" ({self._unlogged} more since the last line)" if self._unlogged else ""
        self._unlogged = 0
        self._log.warning("%s%s", sentence, others)
