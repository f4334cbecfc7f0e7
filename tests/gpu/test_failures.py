"""Errors of the device name the task at fault, however late they show, and the process ends."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from gpu.failing import MICROBATCH, STAGES
from under_torchrun import run

from benchmarks.gpu.target import Target

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

#: From the failure to the error, and from the error to the end of the process.
SOON_S, END_S = 10.0, 15.0


@pytest.mark.parametrize("fault", ["assert", "memory"])
def test_a_failure_of_the_device_names_its_task_and_the_process_ends(
    fault: str, target: Target, record_property: Any
) -> None:
    command = [sys.executable, str(Path(__file__).with_name("failing.py")), target.name, fault]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    reported = time.monotonic()
    try:
        _, errors = process.communicate(timeout=END_S)
    finally:
        process.kill()
        process.communicate()
    assert line, errors[-2000:]
    assert process.returncode == 0, errors[-2000:]
    record_property("seconds from the error to the end of the process", round(time.monotonic() - reported, 2))
    check(json.loads(line), fault, STAGES - 1, target, record_property)


@pytest.mark.parametrize("fault", ["assert", "memory"])
def test_every_process_names_the_task_of_the_one_that_failed(fault: str, target: Target, record_property: Any) -> None:
    done = run("gpu/failing.py", target.name, fault, ranks=2, timeout_s=100)
    reports = sorted(map(json.loads, done.stdout.splitlines()), key=lambda report: int(report["rank"]))
    assert [report["rank"] for report in reports] == [0, 1], done.stderr[-2000:]
    assert done.returncode == 0, done.stderr[-2000:]
    for report in reports:
        check(report, fault, 1, target, record_property)


def check(report: dict[str, Any], fault: str, stage: int, target: Target, record_property: Any) -> None:
    for name in ("text", "notes", "seconds"):
        record_property(f"rank {report['rank']}, {name}", report.get(name))
    assert (report["error"], report["task"]) == ("PipelineAborted", f"F{MICROBATCH}@{stage}")
    assert report["seconds"] < SOON_S
    if fault == "memory":
        assert "OutOfMemoryError" in report["text"]
    elif target.is_cuda and report["rank"] == stage:
        assert "kernels run later than they are launched" in " ".join([report["text"], *report["notes"]])
