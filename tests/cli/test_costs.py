"""`rrfp costs`: from traces to a cost file that `rrfp simulate` and `rrfp sweep` run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli.shell import rrfp

from rrfp.costs import make_costs, read_costs
from rrfp.lab.simulation import planned_sizes, simulate
from rrfp.model.placement import Layout
from rrfp.trace.chrome import ChromeRun, write_chrome, write_runs


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Four steps of two replicas."""
    tables = [make_costs("mllm", 3, 4, seed=seed, step=step, latency="wire") for seed in (0, 1) for step in range(4)]
    traces = [simulate(table, hint="bf").result.trace(step % 4) for step, table in enumerate(tables)]
    runs = [ChromeRun(f"replica {r}", range(3), traces[4 * r : 4 * r + 4], 0.0) for r in (0, 1)]
    write_runs(tmp_path / "trace.json", runs, {"clocks": [{"error_s": 0.0}, {"error_s": 0.0002}, {"error_s": 0.0001}]})
    return tmp_path / "trace.json"


def test_the_file_goes_into_simulate_and_sweep(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "costs.json"
    result = rrfp("costs", trace, "--out", out)
    assert result.exit_code == 0, result.stderr
    assert "4 training step(s) of 4 microbatches" in result.stdout
    assert "left out: 4 at the beginning" in result.stdout
    assert "clocks of hosts are known to 0.300 ms" in result.stdout
    assert "sizes of microbatches: none recorded; where all ranks pass sizes= to step()" in result.stdout
    line = f"rrfp sweep --costs {out} --hint slot-aware-pyramid --limit 1f1b,n,2n --strict 1f1b"
    assert f"{out} written: {line}\n" in result.stdout
    assert "skipped" not in rrfp(*line.split()[1:]).stdout
    assert rrfp("simulate", "--costs", out, "--hint", "bf", "--json").exit_code == 0
    compared = rrfp("sweep", "--costs", out, "--hint", "bf,fb", "--limit", "1f1b,2n", "--strict", "1f1b", "--json")
    assert len(json.loads(compared.stdout)["runs"]) == 5


def test_recorded_sizes_go_into_the_file_and_the_sweep(tmp_path: Path) -> None:
    table = make_costs("mllm", 4, 16, seed=3)
    sizes = tuple(planned_sizes(table))
    steps = [replace(simulate(table, hint="bf").result.trace(step), sizes=sizes) for step in range(3)]
    write_chrome(tmp_path / "trace.json", steps)
    out = tmp_path / "costs.json"
    result = rrfp("costs", tmp_path / "trace.json", "--out", out)
    assert "sizes of microbatches: as step(sizes=...) had them" in result.stdout
    assert read_costs(out).sizes == sizes
    assert json.loads(rrfp("costs", tmp_path / "trace.json", "--json").stdout)["costs"]["sizes"] == list(sizes)
    method = ("--hint", "slot-aware-pyramid", "--limit", "1f1b", "--json")
    own, planned = (
        json.loads(rrfp("simulate", "--costs", out, *method, *sized).stdout)["order"]
        for sized in ((), ("--sizes", "planned"))
    )
    assert own == planned


@pytest.mark.parametrize(
    ("chunks", "placement", "split", "options"),
    [
        (2, "looped", False, "--limit n,2n --strict interleaved-1f1b"),
        (2, "v", True, "--limit n,2n --strict zb-v"),
        (2, "v", False, "--limit n,2n"),
    ],
)
def test_the_line_to_copy_has_methods_that_fit(
    tmp_path: Path, chunks: int, placement: Layout, split: bool, options: str
) -> None:
    table = make_costs("mllm", 2, 4, chunks=chunks, placement=placement, split=split)
    write_chrome(tmp_path / "trace.json", [simulate(table, hint="bf").result.trace(step) for step in range(3)])
    out = tmp_path / "costs.json"
    line = rrfp("costs", tmp_path / "trace.json", "--out", out).stdout.splitlines()[-1]
    assert line == f"{out} written: rrfp sweep --costs {out} --hint slot-aware-pyramid {options}"
    swept = rrfp(*line.partition(": rrfp ")[2].split())
    assert (swept.exit_code, swept.stderr) == (0, "")
    assert "skipped" not in swept.stdout


def test_json_has_the_figures_and_the_file(trace: Path, tmp_path: Path) -> None:
    arguments = ("--run", "replica 1", "--skip-first", "0", "--step", "mean")
    document: dict[str, Any] = json.loads(rrfp("costs", trace, *arguments, "--json").stdout)
    assert set(document) == {
        *("out", "step", "steps", "left_out", "step_seconds", "latency", "messages", "clock_error", "costs"),
    }
    assert (document["out"], document["step"], document["steps"], document["left_out"]) == (None, None, 4, [])
    assert document["messages"] == {"measured": 2 * 2 * 4, "filled": 0}
    assert document["latency"] == "measured"
    assert document["clock_error"] == pytest.approx(0.0003)
    out = tmp_path / "costs.json"
    assert rrfp("costs", trace, *arguments, "--out", out).exit_code == 0
    assert read_costs(out).forward.tolist() == document["costs"]["F"]


def test_one_step_as_it_was_and_messages_by_a_model(trace: Path) -> None:
    document = json.loads(rrfp("costs", trace, "--step", "3", "--latency", "none", "--json").stdout)
    assert (document["step"], document["steps"], document["latency"]) == (3, 2, "none")  # of each replica
    assert {value for row in document["costs"]["latency_F"] for value in row} == {0}
    assert "messages: latency none" in rrfp("costs", trace, "--latency", "none").stdout
    assert "--out FILE writes the cost file" in rrfp("costs", trace).stdout


def test_the_table_has_the_style_of_the_other_commands(trace: Path) -> None:
    lines = rrfp("costs", trace).stdout.splitlines()
    assert lines[1].split() == ["stage", *["F", "least", "-", "most"], *["B", "least", "-", "most"]]
    assert [line.split()[0] for line in lines[2:5]] == ["0", "1", "2"]
    assert lines[5] == "milliseconds a microbatch: mean, and least - most"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--run", "replica 2"), "run is 'replica 2', must be one of: replica 0, replica 1"),
        (
            ("--skip-first", "1", "--step", "1"),
            "--skip-first leaves steps out, --step 1 takes one: must be one of them",
        ),
        (("--skip-first", "-1"), "--skip-first is -1, must be a whole number >= 0"),
        (("--skip-first", "4"), "{trace}: replica 0 has 4 training step(s), and skip-first is 4, must be less"),
        (("--step", "9"), "step is 9, must be one of: 0, 1, 2, 3"),
        (("--step", "-1"), "step is '-1', must be a step's number or one of: typical, median, mean"),
        (("--out", "nowhere/costs.json"), "nowhere/costs.json: cannot be written (no such folder, or not allowed)"),
        (("{trace}",), "TRACE is {trace} twice, must be named once"),
        (("missing.json",), "missing.json: cannot be read (No such file or directory)"),
    ],
)
def test_bad_usage_is_one_line(trace: Path, arguments: tuple[str, ...], message: str) -> None:
    result = rrfp("costs", trace, *(argument.format(trace=trace) for argument in arguments))
    assert (result.exit_code, result.stderr) == (2, f"rrfp: {message.format(trace=trace)}\n")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("args", "arrived"), "soon", "args.arrived is 'soon', must be a finite number, or None"),
        (("args", "arrived"), 1e999, "args.arrived is inf, must be a finite number, or None"),
        (("args", "to stage"), -1, "args.to stage is -1, must be a whole number >= 0"),
        (("args", "step"), True, "args.step is True, must be a whole number >= 0"),
        (("args", "bytes"), None, "args.bytes is None, must be a whole number >= 0"),
        (("args", "task"), 3, "args.task is 3, must be a task such as F3@5"),
        (("args", "task"), "G3@5", "task 'G3@5' is not of the form F3@5"),
        (("args",), [], "args is [], must be an object"),
        (("tid",), 0, "tid is 0, must be a whole number >= 1"),
    ],
)
def test_a_message_that_is_wrong_is_refused_by_event_and_field(
    trace: Path, path: tuple[str, ...], value: Any, message: str
) -> None:
    document = json.loads(trace.read_text())
    index = next(i for i, event in enumerate(document["traceEvents"]) if event["ph"] == "s")
    place = document["traceEvents"][index]
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    trace.write_text(json.dumps(document))
    result = rrfp("costs", trace)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"rrfp: {trace}: traceEvents[{index}]: {message}")


@pytest.mark.parametrize("error", ["much", -1.0, None, True, 1e999])
def test_a_clock_error_that_is_wrong_is_refused(trace: Path, error: Any) -> None:
    document = json.loads(trace.read_text())
    document["otherData"]["clocks"][1]["error_s"] = error
    trace.write_text(json.dumps(document))
    result = rrfp("costs", trace)
    assert result.stderr.startswith(f"rrfp: {trace}: otherData.clocks[1].error_s is ")


def test_a_file_that_is_read_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("{}")
    result = rrfp("costs", path, "--out", path)
    assert result.exit_code == 2
    assert "trace.json: is read by this command, must be another file to be written" in result.stderr
    assert path.read_text() == "{}"
