"""`rrfp advise`: from a trace to what slows its steps, and what a setting would change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli.shell import rrfp

from rrfp.costs import make_costs
from rrfp.lab.simulation import simulate
from rrfp.trace.chrome import ChromeRun, write_runs
from rrfp.trace.job_data import TracedJob


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Eight steps of two replicas with a tight limit."""
    steps = [make_costs("mllm", 3, 6, step=step, jitter="J2", latency="constant") for step in range(8)]
    traces = [simulate(table, hint="bf", limit="1f1b").result.trace(number) for number, table in enumerate(steps)]
    write_runs(tmp_path / "trace.json", [ChromeRun(f"replica {r}", range(3), traces, 0.0) for r in (0, 1)])
    return tmp_path / "trace.json"


def test_it_prints_predicted_beside_measured_then_causes_then_settings(trace: Path) -> None:
    result = rrfp("advise", trace, "--hint", "bf", "--limit", "1f1b")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0] == (
        f"{trace}: replica 0: 6 steps (left out: 2 at the beginning), 6 microbatches on 3 stages, hint bf, limit 1f1b"
    )
    assert lines[1].startswith("a step took ")
    assert lines[1].endswith("(1.000 of it)")
    [memory] = [line for line in lines if "  memory limit: stage 0 waited for memory " in line]
    assert "+-" in memory
    assert 'of the step: limit="2n" (holds 6, now 3) predicts -' in result.stdout
    assert lines.index(memory) < next(n for n, line in enumerate(lines) if line.startswith("Settings"))
    assert "Assumed:" in lines


def test_json_has_the_same_figures(trace: Path) -> None:
    arguments = ("--hint", "bf", "--limit", "1f1b", "--run", "replica 1", "--skip-first", "1", "--steps", "5", "--json")
    document: dict[str, Any] = json.loads(rrfp("advise", trace, *arguments).stdout)
    assert document.keys() == {
        *("name", "steps", "left_out", "method", "measured", "predicted", "ratio", "held"),
        *("causes", "settings", "assumed", "doubt"),
    }
    assert document["name"] == f"{trace}: replica 1"
    assert document["steps"] == [3, 4, 5, 6, 7]
    assert document["ratio"] == pytest.approx(1, abs=1e-6)
    shares = [cause["share"]["value"] for cause in document["causes"]]
    assert shares == sorted(shares, reverse=True)
    for setting in document["settings"]:
        saved = setting["saved"]
        assert 0 < saved["low"] <= saved["value"] <= saved["high"]
        assert setting["seconds"] < document["predicted"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--run", "replica 2"), "run is 'replica 2', must be one of: replica 0, replica 1"),
        (("--steps", "4"), "--steps is 4, must be a whole number >= 5"),
        (("--skip-first", "-1"), "--skip-first is -1, must be a whole number >= 0"),
        (("--limit", "all"), "limit is 'all', must be a number of microbatches or one of: 1f1b, n, 2n, auto"),
        (("--hint", "none"), "hint is 'none', must be one of: "),
        (("--strict", "none"), "strict is 'none', must be one of: "),
        (("--strict", "1f1b", "--hint", "bf"), "--hint goes without --strict: a schedule is the order of all tasks"),
        (("--skip-first", "4"), "{trace}: replica 0 has 4 training step(s) to replay beside those left out (4 at the "),
    ],
)
def test_bad_usage_is_one_line(trace: Path, arguments: tuple[str, ...], message: str) -> None:
    result = rrfp("advise", trace, *arguments)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert message.format(trace=trace) in result.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "cannot be read (No such file or directory)"), ("{", "is not JSON"), ("{}", "traceEvents is missing")],
)
def test_a_file_that_is_no_trace_is_one_line(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "other.json"
    if text is not None:
        path.write_text(text)
    result = rrfp("advise", path)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert message in result.stderr


def test_options_that_differ_from_the_trace_are_told(tmp_path: Path) -> None:
    steps = [make_costs("mllm", 3, 6, step=step, latency="constant") for step in range(8)]
    traces = [simulate(table, hint="bf", limit="1f1b").result.trace(number) for number, table in enumerate(steps)]
    other_data = {"job": TracedJob("bf", "1f1b", None).to_plain()}
    write_runs(tmp_path / "t.json", [ChromeRun("job", range(3), traces, 0.0)], other_data)
    plain = rrfp("advise", tmp_path / "t.json", "--hint", "bf", "--limit", "1f1b").stdout
    assert "although" not in plain
    other = rrfp("advise", tmp_path / "t.json", "--hint", "f-priority", "--limit", "n").stdout
    assert "  hint f-priority (--hint), although the trace says that the job had bf\n" in other
    assert "  limit n (--limit), although the trace says that the job had 1f1b\n" in other
    strict = rrfp("advise", tmp_path / "t.json", "--strict", "gpipe").stdout
    assert "  strict gpipe (--strict), although the trace says no strict\n" in strict
