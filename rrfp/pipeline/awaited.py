"""The futures that callers wait for, and that the runtime's loop completes as long as it runs."""

from __future__ import annotations

import threading
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any


class AwaitedFutures:
    """Those that are not complete. All methods may be called on any thread.

    Each future refers to this object, and a result that a caller keeps to its future: so nothing here may refer to the
    pipeline.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: set[Future[Any]] = set()
        self._error: BaseException | None = None

    def add(self, future: Future[Any]) -> None:
        """Fail ``future`` should the loop run no more, or if it does not already."""
        with self._lock:
            error = self._error
            if error is None:
                self._pending.add(future)
        if error is not None:
            _fail(future, error)
        future.add_done_callback(self._forget)

    def fail(self, error: BaseException) -> None:
        """The loop does not run any more: all of them fail with ``error``. Later ones too, with the first error."""
        with self._lock:
            self._error = self._error or error
            pending = list(self._pending)
        for future in pending:
            _fail(future, error)

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            self._pending.discard(future)


def _fail(future: Future[Any], error: BaseException) -> None:
    with suppress(InvalidStateError):  # it completed meanwhile
        future.set_exception(error)
