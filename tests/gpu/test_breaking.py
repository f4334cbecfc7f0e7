"""A device that breaks while all stages have work: the error names a task, and each process ends by itself."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.target import Target

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


@pytest.mark.parametrize(
    ("stages", "after_us"),
    [*((2, after_us) for after_us in (0, 100, 300, 1000, 3000)), *((4, us) for us in (0, 100, 300, 1000, 2000, 4000))],
)
def test_an_error_names_a_task_and_the_process_ends_in_order_whoever_holds_received_tensors(
    stages: int, after_us: int, target: Target, record_property: Any
) -> None:
    if target.name == "cuda":
        pytest.skip("a GPU breaks by a kernel of a task only: test_failures.py")
    command = [sys.executable, str(Path(__file__).with_name("breaking.py")), target.name, str(after_us), str(stages)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    line, _, rest = done.stdout.partition("\n")
    assert (done.returncode, rest) == (0, "ended\n"), done.stderr[-3000:]
    report = json.loads(line)
    record_property("task", report["task"])
    assert report["problems"] == []
    assert report["error"] == "PipelineAborted"
    assert re.fullmatch(r"[FB]\d@\d", report["task"])
    assert ("failed on the device" if target.name == "double" else "device-side assert") in report["text"]
