"""A pipeline that lives as long as an object of another framework: `OpenPipeline`."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import weakref
from typing import Any

from rrfp import Pipeline, PipelineAborted
from rrfp.errors import RrfpError

logger = logging.getLogger(__name__)


class OpenPipeline:
    """A pipeline that is left once: by `close`, because of a failure, or when its owner or the interpreter ends.

    ``what`` it is to its user, and how to have ``another`` one, stands in errors.
    """

    def __init__(self, pipeline: Pipeline, owner: object, what: str, another: str = "build a new one") -> None:
        self._what = what
        self._another = another
        self.calls = pipeline.blocking()
        self.calls.__enter__()
        self._failure = ""
        self._leave = weakref.finalize(owner, leave_unasked, self.calls, what)

    def check_usable(self) -> None:
        """Refuse another step of one that has ended."""
        if self._failure:
            raise RrfpError(f"this {self._what} ended with {self._failure}; {self._another}")
        if not self._leave.alive:
            raise RrfpError(f"this {self._what} was closed; {self._another}")

    def close(self) -> None:
        """Leave in order; a second call does nothing."""
        if self._leave.detach() is not None:
            self.calls.__exit__(None, None, None)

    def fail(self, error: BaseException) -> None:
        self._failure = type(error).__name__
        if self._leave.detach() is not None:
            self.calls.__exit__(type(error), error, error.__traceback__)


def leave_unasked(pipe: Any, what: str) -> None:
    """Leave, where the last reference to the owner is gone, or the interpreter ends: in order, or by its error."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        _leave_quietly(pipe, what)
    else:  # the garbage collector may run on the pipeline's own loop, which must not wait for itself
        threading.Thread(target=_leave_quietly, args=(pipe, what), name="rrfp-leaving").start()


def _end_of_program() -> BaseException | None:
    """The exception that ends this program, of which the other ranks are to learn; None if it goes on, or is done."""
    # In a session that goes on, this may be an earlier error: the main thread counts as alive until exit handlers run.
    return None if threading.main_thread().is_alive() else getattr(sys, "last_value", None)


def _leave_quietly(pipe: Any, what: str) -> None:
    error = _end_of_program()
    try:
        pipe.__exit__(None if error is None else type(error), error, None)
    except PipelineAborted as error:
        logger.warning("a %s of this process, which nothing uses any more, had ended: %s", what, error)
