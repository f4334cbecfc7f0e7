"""Python stacks as people read them, of stuck threads and of errors: without the frames of this package in front."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType, TracebackType

#: Frames of one stack, and characters of one text, that are told; the innermost ones, which say most.
MOST_FRAMES = 40
MOST_CHARACTERS = 8192

_OWN = str(Path(__file__).parents[1])


def stack_of(thread: int | None) -> str:
    """The stack of the thread with ident ``thread``, the innermost call last, from the first frame of other code on.

    Returns:
        One or two lines a frame; empty where there is no such thread.
    """
    frame = None if thread is None else sys._current_frames().get(thread)
    return "" if frame is None else _format(frame, skip_own=True)


def all_stacks(first: int | None = None) -> str:
    """The stacks of all threads of this process, whole, each under the thread's name.

    Args:
        first: the ident of the thread to begin with.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != first)
    own = threading.get_ident()
    told = (f"thread {names.get(ident, ident)}:\n{_format(frame)}" for ident, frame in frames if ident != own)
    return "\n".join(told)


def trim(error: BaseException) -> None:
    """Leave out how the runtime came to call the code that raised ``error``, here and in what led to it."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        one.__traceback__ = _without_own(one.__traceback__)
        one = one.__cause__ or one.__context__


def place_of(error: BaseException) -> str:
    """Where ``error`` was raised, in one line; empty where that was in this package, or is not known."""
    told = traceback.extract_tb(error.__traceback__)
    if not told or told[-1].filename.startswith(_OWN):
        return ""
    last = told[-1]
    return f"{last.filename}:{last.lineno}, in {last.name}" + (f": {last.line}" if last.line else "")


def _without_own(found: TracebackType | None) -> TracebackType | None:
    first = found
    while first is not None and first.tb_frame.f_code.co_filename.startswith(_OWN):
        first = first.tb_next
    return found if first is None else first  # an error of the runtime itself stays whole


def _format(frame: FrameType, *, skip_own: bool = False) -> str:
    summary: Iterable[traceback.FrameSummary] = traceback.extract_stack(frame)[-MOST_FRAMES:]
    if skip_own:
        summary = _from_first_other(list(summary))
    text = "".join(traceback.format_list(list(summary))).rstrip()
    return text if len(text) <= MOST_CHARACTERS else "..." + text[-MOST_CHARACTERS:]


def _from_first_other(summary: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Leave out how the runtime came to call somebody else's code; everything stays where it did not."""
    own = [index for index, frame in enumerate(summary) if frame.filename.startswith(_OWN)]
    if not own:
        return summary
    # The frames of the thread's start are in front of the package's first one.
    first = next((i for i in range(own[0], len(summary)) if not summary[i].filename.startswith(_OWN)), None)
    return summary if first is None else summary[first:]
