"""Loggers: structured events on the standard library's loggers under ``rrfp``.

A library must not configure logging for the whole program. So each logger has its own processors, and passes the
sentence to `logging` with its fields as attributes of the record: plain formatters print the sentence, structured ones
the fields too.
"""

from __future__ import annotations

import logging
from typing import cast

import structlog


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """The structured logger over ``logging.getLogger(name)``."""
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
