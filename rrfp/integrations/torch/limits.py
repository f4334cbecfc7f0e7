"""A time limit for calls of torch that block until all ranks make them, and have none of their own worth the name."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from rrfp.errors import TransportError

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: The default of ``init_timeout``, in seconds: the first step of a rank may compile its stages.
INIT_S = 600.0


#: Between two looks at the pipeline, in seconds.
LOOK_S = 0.1


#: For whom a call waits, where that is unknown.
UNKNOWN = "some rank of the stages' group does not call it, or failed in it; "


#: After how many seconds a log line says that a call waits.
WARN_S = 10.0


def within(
    seconds: float,
    what: str,
    call: Callable[[], T],
    check: Callable[[], None] = lambda: None,
    missing: Callable[[], str] = str,
    *,
    warn_s: float = WARN_S,
) -> T:
    """The result of ``call``, made on a thread of its own, unless ``check`` raises meanwhile; logs a long wait once.

    Args:
        seconds: the limit.
        what: the call's name.
        call: what may block.
        check: asked every now and then.
        missing: for whom the call waits, as the beginning of a sentence; empty if unknown.
        warn_s: after how many seconds the wait is logged.

    Raises:
        TransportError: if it takes longer than ``seconds``. The thread is left behind: torch's calls cannot be ended.
    """
    outcome: Future[T] = Future()
    thread = threading.Thread(target=_run, args=(call, outcome), name=f"rrfp-{what}", daemon=True)
    thread.start()
    deadline, warning = time.monotonic() + seconds, time.monotonic() + warn_s
    while not _is_done(outcome, min(LOOK_S, max(0.0, deadline - time.monotonic()))):
        check()
        if time.monotonic() >= warning:
            warning = float("inf")
            logger.warning(
                "%s has not ended for %g s, and may take %g s (init_timeout): %sit waits until every rank of the "
                "stages' group has built its ScheduleRRFP and called step or eval as often; here it is %s",
                what,
                warn_s,
                seconds,
                missing(),
                _place_of(thread),
            )
        if time.monotonic() >= deadline:
            raise TransportError(
                f"{what} did not end within init_timeout, {seconds:g} s: {missing() or UNKNOWN}here it waits "
                f"{_place_of(thread)}"
            )
    if outcome.exception() is not None:
        check()  # a peer that failed has closed its connections, too: the failure says more
    return outcome.result()


def _is_done(outcome: Future[Any], seconds: float) -> bool:
    done, _ = wait([outcome], seconds)
    return bool(done)


def _run(call: Callable[[], Any], outcome: Future[Any]) -> None:
    try:
        outcome.set_result(call())
    except BaseException as error:
        outcome.set_exception(error)


def _place_of(thread: threading.Thread) -> str:
    """The innermost Python frames of ``thread``."""
    frame = sys._current_frames().get(thread.ident or 0)
    frames = [] if frame is None else traceback.extract_stack(frame)[-3:]
    return " < ".join(f"in {each.name} ({each.filename}:{each.lineno})" for each in reversed(frames))
