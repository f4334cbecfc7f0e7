"""What ranks send of their traces: rank 0 refuses what is none, and writes no file of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

from rrfp import Topology
from rrfp.core.usage import Peaks, WaitCause
from rrfp.errors import ProtocolError
from rrfp.lab.traces.chrome_reader import read_chrome
from rrfp.model.tasks import Kind, Task
from rrfp.runtime.trace_saver import ClockOffset, HostClock, _write
from rrfp.trace.plain import to_plain
from rrfp.trace.spans import MessageSpan, StepTrace, TaskSpan, WaitSpan

CLOCKS = [HostClock("here", (0, 1), ClockOffset())]


def trace(step: int, stage: int) -> dict[str, Any]:
    task = Task(Kind.F, 0, stage)
    return to_plain(
        StepTrace(
            *(step, 0.0, 3.0),
            (TaskSpan(stage, task, 1.0, 2.0),),
            (WaitSpan(stage, WaitCause.INPUT, 0.0, 1.0),),
            (MessageSpan(0, 1, Task(Kind.F, 0, 0), 0.5, 0.75, 8),),
            peaks={stage: Peaks(1, 2, 3, 4)},
        )
    )


def write(path: Path, *traces: dict[str, Any]) -> None:
    """Rank 0 writes a step of its own beside what rank 1 sent."""
    packed = {0: msgpack.packb(trace(0, 0)), 1: b"".join(map(msgpack.packb, traces))}
    assert _write(str(path), packed, CLOCKS, Topology(0, 2)) == ""


def test_a_step_of_both_ranks_is_written(tmp_path: Path) -> None:
    write(tmp_path / "trace.json", trace(0, 1))
    (run,) = read_chrome(tmp_path / "trace.json")
    assert run.stages == (0, 1)


Change = Callable[[dict[str, Any]], object]

WRONG: dict[str, Change] = {
    "another step": lambda plain: plain.update(step=3),
    "no step": lambda plain: plain.pop("step"),
    "a list for a step": lambda plain: plain.update(step=[]),
    "a text for a time": lambda plain: plain.update(start="0"),
    "no number": lambda plain: plain.update(end=math.nan),
    "no list": lambda plain: plain.update(tasks=5),
    "no task": lambda plain: plain["tasks"][0].__setitem__(1, "F0"),
    "four times": lambda plain: plain["tasks"][0].extend([1.0, 2.0]),
    "a negative stage": lambda plain: plain["waits"][0].__setitem__(0, -1),
    "no cause": lambda plain: plain["waits"][0].__setitem__(1, "lunch"),
    "a cause that goes on and on": lambda plain: plain["waits"][0].__setitem__(1, [None] * 9000),
    "a message to no stage": lambda plain: plain["messages"][0].__setitem__(1, None),
    "no bytes": lambda plain: plain["messages"][0].__setitem__(5, 0.5),
    "too many peaks": lambda plain: plain["peaks"][0].append(5),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_trace_is_the_sender_s_mistake(wrong: str, tmp_path: Path) -> None:
    plain = trace(0, 1)
    WRONG[wrong](plain)
    with pytest.raises(ProtocolError) as caught:
        write(tmp_path / "trace.json", plain)
    assert len(str(caught.value)) < 500
    assert not (tmp_path / "trace.json").exists()


@pytest.mark.parametrize("steps", [[], [0, 1]])
def test_more_or_fewer_steps_than_the_others_sent_are_refused(steps: list[int], tmp_path: Path) -> None:
    with pytest.raises(ProtocolError, match="step"):
        write(tmp_path / "trace.json", *(trace(step, 1) for step in steps))
