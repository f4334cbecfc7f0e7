"""Python stacks of stuck threads and of errors, without the leading frames of this package."""

from __future__ import annotations

import logging
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType, TracebackType
from typing import TypeVar
from weakref import WeakSet

from rrfp.errors import RrfpError

#: The most frames of one stack, and characters of one text, that are reported: the innermost ones, which say most.
MOST_FRAMES = 40
MOST_CHARACTERS = 8192

#: With the separator at its end: a plugin's package may have a name that begins like this one's.
_PACKAGE = str(Path(__file__).parents[1] / "_").removesuffix("_")

#: The folders of Python's own modules, and the names of those in which distributions are installed.
_STANDARD = (sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["platstdlib"])
_INSTALLED = frozenset({"site-packages", "dist-packages"})

_Error = TypeVar("_Error", bound=BaseException)

_logged: WeakSet[RrfpError] = WeakSet()


def stack_of(thread: int | None) -> str:
    """The stack of a thread from its first frame outside this package; empty if there is none."""
    frame = None if thread is None else sys._current_frames().get(thread)
    return "" if frame is None else _format(frame, skip_package=True)


def all_stacks(first: int | None = None) -> str:
    """The stacks of all other threads by name, that of ``first`` first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != first)
    this = threading.get_ident()
    return "\n".join(f"thread {names.get(ident, ident)}:\n{_format(frame)}" for ident, frame in frames if ident != this)


def trim(error: BaseException) -> None:
    """Drop the leading frames of this package from the tracebacks of ``error``."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        current.__traceback__ = _without_package(current.__traceback__)
        current = current.__cause__ or current.__context__


def from_here(error: _Error) -> _Error:
    """``error`` to be raised again where a caller called: the runtime's frames would bury the caller's."""
    trim(error)
    return error.with_traceback(None)


def place_of(error: BaseException) -> str:
    """The innermost line of the caller's own code when ``error`` was raised; empty if none took part."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or frames[-1].filename.startswith(_PACKAGE):
        return ""
    own = next((frame for frame in reversed(frames) if not _is_library(frame.filename)), None)
    if own is None:
        return ""
    line = f"{own.filename}:{own.lineno}, in {own.name}" + (f": {own.line}" if own.line else "")
    last = frames[-1]
    return line if own is last else f"{line} (in {last.name} of {Path(last.filename).name}:{last.lineno})"


def _is_library(filename: str) -> bool:
    """Whether a file belongs to Python, to an installed distribution or to this package."""
    return filename.startswith(("<", _PACKAGE, *_STANDARD)) or not _INSTALLED.isdisjoint(Path(filename).parts)


def print_no_traceback(error: RrfpError) -> None:
    """Print nothing should ``error`` end the program: its text has been logged already."""
    if not logging.getLogger("rrfp").isEnabledFor(logging.ERROR):
        return
    if not _logged:
        before = sys.excepthook

        def print_others(kind: type[BaseException], value: BaseException, frames: TracebackType | None) -> None:
            if not (isinstance(value, RrfpError) and value in _logged):
                before(kind, value, frames)

        sys.excepthook = print_others
    _logged.add(error)


def _without_package(whole: TracebackType | None) -> TracebackType | None:
    first = whole
    while first is not None and first.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        first = first.tb_next
    return whole if first is None else first  # an error of the runtime itself keeps all frames


def _format(frame: FrameType, *, skip_package: bool = False) -> str:
    summary: Iterable[traceback.FrameSummary] = traceback.extract_stack(frame)[-MOST_FRAMES:]
    if skip_package:
        summary = _from_first_other(list(summary))
    text = "".join(traceback.format_list(list(summary))).rstrip()
    return text if len(text) <= MOST_CHARACTERS else "..." + text[-MOST_CHARACTERS:]


def _from_first_other(summary: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Drop the frames up to the last leading one of this package."""
    package = [index for index, frame in enumerate(summary) if frame.filename.startswith(_PACKAGE)]
    if not package:
        return summary
    # The frames of the thread's start precede the first frame of the package.
    first = next((i for i in range(package[0], len(summary)) if not summary[i].filename.startswith(_PACKAGE)), None)
    return summary if first is None else summary[first:]
