"""Reads messages, and the error of clocks, from the files of `rrfp.trace.chrome`."""

from __future__ import annotations

import math
import reprlib
from typing import Any

from rrfp.core.tasks import Task
from rrfp.trace.chrome import STEPS_THREAD
from rrfp.trace.spans import MessageSpan


def is_message(event: dict[str, Any]) -> bool:
    """Whether ``event`` begins an arrow and has its message's times; files of older versions have none."""
    return event.get("ph") == "s" and event.get("cat") == "message" and "args" in event


def read_message(event: dict[str, Any]) -> tuple[int, MessageSpan]:
    """The step and the message of an arrow's beginning; its time of sending is not in the file.

    Raises:
        ValueError: if a field is missing or wrong, naming it.
    """
    args = event["args"]
    if not isinstance(args, dict):
        raise ValueError(f"args is {reprlib.repr(args)}, must be an object")
    source = _whole("tid", event.get("tid"), STEPS_THREAD + 1) - STEPS_THREAD - 1
    target, num_bytes = _whole("args.to stage", args.get("to stage")), _whole("args.bytes", args.get("bytes"))
    step, task, arrived = _whole("args.step", args.get("step")), args.get("task"), args.get("arrived")
    if not isinstance(task, str):
        raise ValueError(f"args.task is {reprlib.repr(task)}, must be a task such as F3@5")
    if arrived is not None and not _is_finite(arrived):
        raise ValueError(f"args.arrived is {reprlib.repr(arrived)}, must be a finite number (microseconds) or null")
    at = None if arrived is None else arrived / 1e6
    return step, MessageSpan(source, target, Task.parse(task), None, at, num_bytes)


def read_clock_error(other_data: Any) -> float:
    """The most by which one time on two ranks may differ in the file, in seconds; 0 where they share a clock.

    Raises:
        ValueError: if the field ``otherData.clocks`` is not what `save_trace` writes.
    """
    clocks = other_data.get("clocks", []) if isinstance(other_data, dict) else []
    if not isinstance(clocks, list):
        raise ValueError(f"otherData.clocks is {reprlib.repr(clocks)}, must be a list")
    errors: list[Any] = [clock.get("error_s") if isinstance(clock, dict) else None for clock in clocks]
    for index, error in enumerate(errors):
        if not _is_finite(error) or error < 0:
            raise ValueError(f"otherData.clocks[{index}].error_s is {reprlib.repr(error)}, must be a number >= 0")
    return sum(sorted(map(float, errors))[-2:])  # of the two ranks that know their offsets least


def _whole(name: str, value: Any, least: int = 0) -> int:
    if type(value) is not int or value < least:
        raise ValueError(f"{name} is {reprlib.repr(value)}, must be a whole number from {least} on")
    return value


def _is_finite(value: Any) -> bool:
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:  # an int beyond the floats
        return False
