"""`rrfp plan`: from a trace to a table, and a file that a pipeline takes."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli.shell import rrfp

from rrfp.costs import make_costs
from rrfp.lab.simulation import simulate
from rrfp.pipeline.plan_file import Plan
from rrfp.trace.chrome import write_chrome


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Eight steps with a tight limit."""
    steps = [make_costs("mllm", 3, 6, step=step, jitter="J2", latency="constant") for step in range(8)]
    traces = [simulate(table, hint="bf", limit="1f1b").result.trace(number) for number, table in enumerate(steps)]
    write_chrome(tmp_path / "trace.json", traces)
    return tmp_path / "trace.json"


def test_it_prints_a_table_the_best_first_and_writes_the_plan(trace: Path, tmp_path: Path) -> None:
    result = rrfp("plan", trace, "--hint", "bf", "--limit", "1f1b", "--out", tmp_path / "plan.json")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert "6 steps (left out: 2 at the beginning), 6 microbatches on 3 stages, hint bf, limit 1f1b" in lines[0]
    names = [line.split("  ")[0] for line in lines[4 : lines.index("", 4)]]
    assert names[:2] == ["1", "2"]
    assert names[-3:] == ["now", "if split", "torch's 1F1B"]
    for said in ("Tried: ", "Left out:", "cut and placement: layer times are not known (--layers)", "torch's ZBV: it"):
        assert said in result.stdout
    assert lines[-1] == f"wrote plan 1 to {tmp_path / 'plan.json'}"
    plan = Plan.read(tmp_path / "plan.json")
    assert (plan.stages, plan.chunks, plan.cuts) == (3, 1, None)


def test_without_a_plan_the_file_stays_and_the_exit_code_is_1(tmp_path: Path) -> None:
    steps = [make_costs("mllm", 3, 6, step=step, latency="constant", sized=True) for step in range(8)]
    write_chrome(tmp_path / "t.json", [simulate(each, hint="bf").result.trace(n) for n, each in enumerate(steps)])
    out = tmp_path / "plan.json"
    out.write_text("old")
    result = rrfp("plan", tmp_path / "t.json", "--memory", "1B", "--out", out)
    assert (result.exit_code, result.stderr) == (1, f"{out} is not written: no plan was found\n")
    assert out.read_text() == "old"
    assert rrfp("plan", tmp_path / "t.json", "--memory", "1B").exit_code == 0


def test_json_is_the_file(trace: Path, tmp_path: Path) -> None:
    result = rrfp("plan", trace, "--microbatches", "12, 6", "--out", tmp_path / "plan.json", "--json")
    assert json.loads(result.stdout) == json.loads((tmp_path / "plan.json").read_text())


def write_layers(path: Path) -> None:
    """Four layers of which the last is long, cut between the second and the third."""
    piece = {"names": [], "backward": 0.002, "num_bytes": 1000}
    layers = [{**piece, "forward": seconds} for seconds in (0.001, 0.001, 0.001, 0.003)]
    ends = {**piece, "forward": 0.0, "backward": 0.0, "num_bytes": 0}
    split = {"stages": 2, "chunks": 1, "placement": "looped", "cuts": [2]}
    path.write_text(json.dumps({**split, "before": ends, "layers": layers, "after": ends}))


def test_layers_alone_do_where_nothing_has_run(tmp_path: Path) -> None:
    write_layers(tmp_path / "layers.json")
    arguments = ("--layers", tmp_path / "layers.json", "--out", tmp_path / "plan.json")
    result = rrfp("plan", *arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0].endswith(
        "layers.json: no step has run, 8 microbatches on 2 stages, hint slot-aware-pyramid, limit 2n"
    )
    assert lines[1].startswith("a step as the file cuts the model: predicted ")
    assert Plan.read(tmp_path / "plan.json").cuts is not None
    assert json.loads(rrfp("plan", *arguments, "--json").stdout)["measured"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "TRACE or --layers FILE is needed"),
        (("--layers", "layers.json", "--steps", "8"), "--steps goes with TRACE"),
        (("--layers", "layers.json", "--skip-first", "3"), "--skip-first goes with TRACE"),
        (("--layers", "layers.json", "--slow-rank", "1"), "slow-rank needs TRACE"),
        (("--layers", "layers.json", "--recomputed", "t.json"), "recomputed needs TRACE"),
        (("--layers", "layers.json", "--out", "layers.json"), "layers.json: is read by this command"),
    ],
)
def test_what_goes_with_a_trace_is_refused_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    write_layers(tmp_path / "layers.json")
    monkeypatch.chdir(tmp_path)
    result = rrfp("plan", *arguments)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert message in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--microbatches", "6,x"), "microbatches is 'x', must be a whole number >= 1"),
        (("--memory", "8"), "memory is '8', must be a size such as 8GB"),
        (("--memory", "8GB"), "the trace has no bytes, which --memory needs"),
        (("--layers", "none.json"), "none.json: cannot be read (No such file or directory)"),
        (("--out", "/nowhere/plan.json"), "/nowhere/plan.json: cannot be written (no such folder"),
        (("--strict", "1f1b", "--hint", "bf"), "--hint goes without --strict"),
    ],
)
def test_bad_usage_is_one_line(trace: Path, arguments: tuple[str, ...], message: str) -> None:
    result = rrfp("plan", trace, *arguments)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert message in result.stderr


def test_ctrl_c_before_anything_was_found_says_so(tmp_path: Path) -> None:
    os.mkfifo(path := tmp_path / "trace.json")
    command = [sys.executable, "-m", "rrfp", "plan", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with path.open("w"):  # opens once the command reads
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=50)
    assert (process.returncode, out, errors) == (130, "", "no plan was found yet\nrrfp: interrupted\n")


def test_ctrl_c_in_the_search_writes_the_best_so_far(tmp_path: Path) -> None:
    steps = [make_costs("mllm", 8, 64, step=step) for step in range(7)]
    traces = [simulate(table, hint="bf", limit="1f1b").result.trace(number) for number, table in enumerate(steps)]
    write_chrome(tmp_path / "trace.json", traces)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "rrfp", "plan", str(tmp_path / "trace.json"), "--out", str(tmp_path / "plan.json")]
    command += ["--hint", "bf", "--limit", "1f1b", "--microbatches", "64,1024,2048,4096", "--tasks", "100000000"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    for name in ("CI", "NO_COLOR", "FORCE_COLOR"):
        environment.pop(name, None)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, text=True, env=environment)
    os.close(theirs)
    shown, is_sent = "", False
    with contextlib.suppress(OSError):  # the end of a terminal
        while text := os.read(ours, 1 << 16).decode(errors="replace"):
            shown += text
            if not is_sent and any(int(count) >= 20 for count in re.findall(r"(\d+)/\?", shown)):
                process.send_signal(signal.SIGINT)
                is_sent = True
    os.close(ours)
    out, _ = process.communicate(timeout=50)
    assert process.returncode == 130
    assert shown.rstrip().endswith("rrfp: interrupted")
    assert "Traceback" not in shown
    assert "Tried, until Ctrl-C:" in out
    assert out.endswith(f"\nwrote plan 1 to {tmp_path / 'plan.json'}\n")
    assert json.loads((tmp_path / "plan.json").read_text())["is_interrupted"]
    assert Plan.read(tmp_path / "plan.json").stages == 8
