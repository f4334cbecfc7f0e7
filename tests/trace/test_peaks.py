"""What stages held travels with the trace of a step: between ranks, through files, to `rrfp trace`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.shell import rrfp as run_rrfp
from torch import nn

import rrfp
from rrfp import StepResult
from rrfp.core.usage import Peaks
from rrfp.errors import ConfigError
from rrfp.lab.traces.chrome_reader import read_chrome
from rrfp.trace.chrome import chrome_events, write_chrome
from rrfp.trace.plain import from_plain, to_plain
from rrfp.trace.spans import StepTrace, merge


def a_step() -> StepResult:
    modules = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(2)]
    inputs = [torch.randn(64, 64) for _ in range(4)]
    with rrfp.local(modules, loss_fn=nn.functional.mse_loss, hint="bf").blocking() as pipe:
        return pipe.step(inputs, inputs)


def test_a_trace_file_has_the_peaks_of_its_steps_and_the_command_shows_them(tmp_path: Path) -> None:
    result, path = a_step(), tmp_path / "trace.json"
    assert min(result.peak_bytes) > 0
    write_chrome(path, [result.trace])
    (run,) = read_chrome(path)
    assert run.steps[0].peaks == dict(enumerate(result.peaks))
    told = json.loads(run_rrfp("trace", path, "--json").stdout)
    assert told[0]["steps"][0]["peak_bytes"] == list(result.peak_bytes)
    assert "MiB" in run_rrfp("trace", path).stdout


def test_a_trace_without_peaks_shows_none(tmp_path: Path) -> None:
    result, path = a_step(), tmp_path / "trace.json"
    bare = StepTrace(0, result.trace.start, result.trace.end, result.trace.tasks)
    path.write_text(json.dumps({"traceEvents": chrome_events([bare])}))
    assert json.loads(run_rrfp("trace", path, "--json").stdout)[0]["steps"][0]["peak_bytes"] is None
    assert "MiB" not in run_rrfp("trace", path).stdout


@pytest.mark.parametrize("peaks", [3, {"0": 5}, {"0": {"held": "many"}}, {"zero": {}}, {"0": {"weight": 1}}])
def test_peaks_that_make_no_sense_are_refused(tmp_path: Path, peaks: Any) -> None:
    path = tmp_path / "trace.json"
    step = {"ph": "X", "pid": 1, "tid": 0, "cat": "step", "ts": 0, "dur": 1, "args": {"step": 0, "peaks": peaks}}
    path.write_text(json.dumps({"traceEvents": [step]}))
    with pytest.raises(ConfigError, match=r"traceEvents\[0\]: args\.peaks is .*, must be numbers from 0 on"):
        read_chrome(path)


def test_peaks_of_ranks_are_merged_by_stage_and_pass_through_plain_data() -> None:
    def part(stage: int, peaks: Peaks) -> StepTrace:
        return StepTrace(0, 0.0, 1.0, peaks={stage: peaks})

    merged = merge(
        [
            part(1, Peaks(2, 30, 1, 5)),
            part(0, Peaks(4, 10)),
            part(1, Peaks(1, 40, 3, 4)),  # another rank of its group
        ]
    )
    assert merged.peaks == {0: Peaks(4, 10), 1: Peaks(2, 40, 3, 5)}
    assert from_plain(json.loads(json.dumps(to_plain(merged)))) == merged
