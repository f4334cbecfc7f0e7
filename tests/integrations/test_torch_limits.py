"""Calls of torch that block: their results and errors pass, and a limit says where the call waits."""

from __future__ import annotations

import asyncio
import threading
import weakref

import pytest

from rrfp.errors import TransportError
from rrfp.integrations.open_pipeline import leave_unasked
from rrfp.integrations.torch.limits import within


def test_results_and_errors_of_the_call_pass() -> None:
    assert within(30, "a call", lambda: 3) == 3
    assert within(30, "a call", threading.current_thread) is not threading.current_thread()

    def fails() -> None:
        raise TimeoutError("of its own")

    with pytest.raises(TimeoutError, match="of its own"):
        within(30, "a call", fails)


def test_a_call_that_takes_too_long_is_named_with_the_place_where_it_waits() -> None:
    ending = threading.Event()
    try:
        with pytest.raises(TransportError, match=r"the wait did not end within init_timeout, 0\.05 s.* in wait \("):
            within(0.05, "the wait", ending.wait)
    finally:
        ending.set()


def test_a_long_wait_is_logged_once_and_says_who_must_call(caplog: pytest.LogCaptureFixture) -> None:
    ending, looks = threading.Event(), []

    def check() -> None:
        looks.append(1)
        if len(looks) == 3:
            ending.set()

    within(30, "the wait", ending.wait, check, lambda: "rank 1 has not come; ", warn_s=0)
    (text,) = (record.getMessage() for record in caplog.records)
    assert text.startswith(
        "the wait has not ended for 0 s, and may take 30 s (init_timeout): rank 1 has not come; it waits until every"
    )
    assert "in wait (" in text


def test_a_failure_meanwhile_ends_the_wait() -> None:
    ending, looks = threading.Event(), []

    def check() -> None:
        looks.append(1)
        if len(looks) == 2:
            raise KeyError("failed")

    try:
        with pytest.raises(KeyError, match="failed"):
            within(30, "the wait", ending.wait, check)
    finally:
        ending.set()


def test_a_failure_of_the_pipeline_is_raised_before_the_error_of_the_call_that_it_ended() -> None:
    def ended() -> None:
        raise RuntimeError("Connection closed by peer")

    def check() -> None:
        raise KeyError("failed")

    with pytest.raises(KeyError, match="failed"):
        within(30, "a call", ended, check)


class Left:
    """Records the thread on which it is left."""

    def __init__(self) -> None:
        self.by: threading.Thread | None = None
        self.done = threading.Event()

    def __exit__(self, *_: object) -> None:
        self.by = threading.current_thread()
        self.done.set()


def test_a_schedule_is_left_at_once_but_never_on_a_loop_that_would_wait_for_itself() -> None:
    """The garbage collector runs on any thread, also on that of the pipeline's own loop."""
    pipe = Left()
    leave_unasked(pipe, "schedule")
    assert pipe.by is threading.current_thread()

    async def collected() -> Left:
        owner, pipe = Left(), Left()
        weakref.finalize(owner, leave_unasked, pipe, "schedule")
        del owner
        return pipe

    pipe = asyncio.run(collected())
    assert pipe.done.wait(10)
    assert pipe.by is not None
    assert pipe.by is not threading.current_thread()
    pipe.by.join(10)
