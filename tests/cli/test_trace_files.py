"""`rrfp trace` refuses a file that is wrong in one line, which names the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli.shell import rrfp


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read (No such file or directory)"),
        ("{", "is not JSON (Expecting property name enclosed in double quotes at line 1 column 2)"),
        ("[" * 100_000, "is not JSON (nested too deeply)"),
        ("[1]", "traceEvents is missing"),
        ('{"traceEvents": []}', "holds no step of a pipeline"),
        (
            '{"traceEvents": [{"ph": "X", "pid": 1, "tid": 0, "cat": "step", "ts": 0, "dur": 1, "args": {"step": 0}}]}',
            "holds no step of a pipeline",
        ),
        (
            '{"traceEvents": [{"ph": "X", "pid": 1, "tid": 1, "cat": "wait","ts": NaN, "dur": 1,"args": {"step": 0}}]}',
            "traceEvents[0]: ts is nan, must be a finite number",
        ),
        ('{"traceEvents": [3]}', "traceEvents[0] must be an object"),
        (
            '{"traceEvents": [{"ph": "X", "pid": 1, "cat": "wait"}]}',
            "traceEvents[0]: args is None, must be an object",
        ),
        (
            '{"traceEvents": [{"ph": "X", "pid": 1, "tid": 1, "cat": "computation", "name": "G1", "ts": 0, "dur": 1,'
            ' "args": {"step": 0}}]}',
            "traceEvents[0]: task 'G1' is not of the form F3@5",
        ),
        (
            '{"traceEvents": [{"ph": "X", "pid": 1, "tid": 1, "cat": "wait", "name": "wait: tea", "ts": 0, "dur": 1,'
            ' "args": {"step": 0}}]}',
            "name is 'wait: tea', must be one of: wait: input",
        ),
        (
            '{"traceEvents": [{"ph": "X", "pid": 1, "tid": 0, "cat": "wait", "name": "wait: input", "ts": 0, "dur": 1,'
            ' "args": {"step": 0}}]}',
            "tid is 0, must be 1 to 16384 for a stage",
        ),
    ],
)
def test_bad_trace_is_one_line_and_exit_2(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "trace.json"
    if text is not None:
        path.write_text(text)
    result = rrfp("trace", path)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith(f"rrfp: {path}: ")
    assert message in result.stderr


STEP: dict[str, Any] = {"ph": "X", "pid": 1, "tid": 0, "cat": "step", "name": "step 0", "ts": 0, "dur": 9}
STEP["args"] = {"step": 0}
TASK = {**STEP, "tid": 1, "cat": "computation", "name": "F0@0"}
NAME = {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "bf"}}
MISSING = object()


@pytest.mark.parametrize(
    ("event", "field", "value", "message"),
    [
        (TASK, "ts", "12", "ts is '12', must be a finite number"),
        (TASK, "ts", True, "ts is True, must be a finite number"),
        (TASK, "ts", None, "ts is None, must be a finite number"),
        (TASK, "ts", MISSING, "ts is missing"),
        (TASK, "ts", 1e308, None),
        (TASK, "ts", 10**400, "ts is 10000"),
        (TASK, "dur", -3, "dur is -3, must be a finite number >= 0"),
        (STEP, "dur", -1e-9, "dur is -1e-09, must be a finite number >= 0"),
        (STEP, "dur", float("inf"), "dur is inf, must be a finite number >= 0"),
        (STEP, "dur", [1], "dur is [1], must be a finite number >= 0"),
        (TASK, "dur", MISSING, "dur is missing"),
        (TASK, "args", [], "args is [], must be an object"),
        (TASK, "args", {}, "args.step is missing"),
        (TASK, "args", {"step": "0"}, "args.step is '0', must be a whole number >= 0"),
        (TASK, "args", {"step": -1}, "args.step is -1, must be a whole number >= 0"),
        (TASK, "args", {"step": 3}, "args.step is 3, and that step has no slice of its own"),
        (TASK, "tid", 1.5, "tid is 1.5, must be a whole number >= 0"),
        (TASK, "tid", MISSING, "tid is missing"),
        (TASK, "tid", 10**9, "tid is 1000000000, must be 1 to 16384 for a stage"),
        (TASK, "name", 5, "name is 5, must be a string that is not empty"),
        (TASK, "name", MISSING, "name is missing"),
        (TASK, "pid", "1", "pid is '1', must be a whole number"),
        (TASK, "pid", MISSING, "pid is missing"),
        (NAME, "args", {}, "args.name is missing"),
        (NAME, "args", {"name": 1}, "args.name is 1, must be a string that is not empty"),
        (NAME, "args", None, "args is None, must be an object"),
        (STEP, "args", {"step": 0, "sizes": 3}, "args.sizes is 3, must be a list of numbers, one a microbatch"),
        (STEP, "args", {"step": 0, "sizes": [1, -1]}, "args.sizes[1] is -1, must be a finite number >= 0"),
        (STEP, "args", {"step": 0, "peaks": {"0": {"held": -1}}}, "args.peaks is {'0': {'held': -1}}, must be numbers"),
        (STEP, "args", {"step": 0, "peaks": {"0": {"held": float("inf")}}}, "args.peaks is {'0': {'held': inf}}, must"),
    ],
)
def test_a_wrong_value_is_refused_by_field_with_file_and_index(
    tmp_path: Path, event: dict[str, Any], field: str, value: Any, message: str | None
) -> None:
    broken = {**event, field: value}
    if value is MISSING:
        del broken[field]
    events = [broken if sound is event else sound for sound in (NAME, STEP, TASK)]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    result = rrfp("trace", path)
    if message is None:
        assert result.exit_code == 0
        return
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    index = (NAME, STEP, TASK).index(event)
    assert result.stderr.startswith(f"rrfp: {path}: traceEvents[{index}]: {message}")


def test_a_step_that_a_run_has_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [STEP, TASK, STEP]}))
    assert rrfp("trace", path).stderr == f"rrfp: {path}: traceEvents[2]: args.step is 0, which the run has twice\n"


def test_a_step_never_takes_less_than_nothing(tmp_path: Path) -> None:
    """The reader rounds ends as the writer does, to the nanosecond; a start that was not rounded may lie above."""
    path = tmp_path / "trace.json"
    events = [{**event, "ts": 0.0004, "dur": 0} for event in (STEP, TASK)]
    path.write_text(json.dumps({"traceEvents": events}))
    result = rrfp("trace", path)
    assert result.stdout.splitlines()[0] == f"{path}: pipeline, step 0, 0.0 us"
    assert "-0.0" not in result.stdout
