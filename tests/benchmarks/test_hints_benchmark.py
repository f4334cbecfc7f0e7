"""The hints benchmark runs every hint within every limit and adds its runs up; a quick run's figures mean nothing."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from statistics import fmean

import pytest
from fork_server import Ended, fork_server, run

from rrfp.hints.registry import hint_names
from rrfp.schedules.registry import schedule_names

__all__ = ["fork_server"]

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "hints" / "run.py"
#: bf is bfw once backward is split; a hint made of a schedule is that schedule's affair.
LEFT_OUT = {"bf", *schedule_names()}


def benchmark(*arguments: str) -> Ended:
    [ended] = run(SCRIPT, *arguments, timeout_s=150)
    return ended


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_every_hint_is_run_within_every_limit_and_the_cells_follow_from_the_runs(tmp_path: Path) -> None:
    runs_file, picture = tmp_path / "runs.csv", tmp_path / "hints.png"
    done = benchmark("--quick", "--json", "--csv", str(runs_file), "--png", str(picture))
    assert done.code == 0, done.errors[-4000:]
    document = json.loads(done.output)
    with runs_file.open() as file:
        runs = list(csv.DictReader(file))
    assert document["runs"] == len(runs)
    assert picture.stat().st_size > 10_000

    shown = {(cell["method"], cell["limit"]) for cell in document["cells"]}
    ours = [name for name in hint_names() if name not in LEFT_OUT]
    hints = {(name, limit) for name in ours for limit in ("1f1b", "N", "2N")}
    assert shown == {*hints, ("1f1b", "1f1b"), ("zb-h1", "N")}
    keys = ("profile", "stages", "jitter", "method", "limit")
    for cell in document["cells"]:
        here = [run for run in runs if all(run[key] == str(cell[key]) for key in keys)]
        assert fmean(float(run["percent_above"]) for run in here) == pytest.approx(cell["above"]["mean"])
        assert cell["above"]["mean"] >= -1e-9
        assert cell["peak"] <= {"1f1b": 1, "N": 1, "2N": 2}[cell["limit"]] * cell["stages"]
        if cell["method"] == "bfw":
            assert cell["gain"]["mean"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "0"], "--seeds is 0, must be at least 1"),
        (["--size-error", "-1"], "--size-error is -1.0, must be 0 to 1"),
        (["--profile", "gpt"], "invalid choice: 'gpt' (choose from"),
        (["--quick", "--latency", "slow"], "latency is 'slow', must be one of: none, constant"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(arguments: list[str], message: str) -> None:
    done = benchmark(*arguments)
    assert done.code != 0
    assert message in done.errors
    assert "Traceback" not in done.errors
