"""`rrfp plan`: from a trace to a table, and a file that a pipeline takes."""

from __future__ import annotations

import json
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
