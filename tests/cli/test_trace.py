"""`rrfp trace`: summaries, single steps, files of several ranks, and timelines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from cli.shell import rrfp
from sim.tables import table

from rrfp.costs import make_costs, write_costs
from rrfp.lab.simulation import Simulation, simulate
from rrfp.lab.traces.timeline import TimeWindow
from rrfp.model.tasks import Kind
from rrfp.trace.chrome import chrome_events, write_chrome
from rrfp.trace.spans import StepTrace


def simulated(step: int = 0) -> Simulation:
    return simulate(make_costs("mllm", 3, 6, jitter="J2", latency="wire", step=step), hint="bf", limit=2)


def traces(steps: Sequence[int]) -> list[StepTrace]:
    return [simulated(step).result.trace(step) for step in steps]


def of_stage(trace: StepTrace, stage: int) -> StepTrace:
    """The part that the rank of ``stage`` recorded."""
    tasks = tuple(span for span in trace.tasks if span.stage == stage)
    waits = tuple(span for span in trace.waits if span.stage == stage)
    return replace(trace, tasks=tasks, waits=waits, messages=())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The trace of four steps, the third of which is the slowest."""
    path = tmp_path / "trace.json"
    write_chrome(path, traces(range(4)), name="bf")
    return path


def test_json_has_every_step_and_their_mean(path: Path) -> None:
    result = rrfp("trace", path, "--json")
    assert result.exit_code == 0
    (run,) = json.loads(result.stdout)
    assert (run["file"], run["run"], [step["step"] for step in run["steps"]]) == (str(path), "bf", [0, 1, 2, 3])
    for step in run["steps"]:
        simulation = simulated(step["step"])
        assert step["peak_held"] == [peak.held for peak in simulation.peaks]
        assert [stage["compute"] for stage in step["stages"]] == pytest.approx(simulation.result.busy, abs=1e-7)
        assert [stage["step"] for stage in step["stages"]] == pytest.approx([simulation.makespan] * 3, abs=1e-7)
        assert step["stages"][0]["blocking_by_cause"]["memory"] > 0
    makespans = [simulated(step).makespan for step in range(4)]
    assert run["slowest_step"] == makespans.index(max(makespans))
    for stage, mean in enumerate(run["mean"]):
        assert (mean["stage"], mean["peak_bytes"]) == (stage, None)
        assert mean["step"] == pytest.approx(sum(makespans) / 4, abs=1e-7)
        assert mean["compute"] == pytest.approx(sum(s["stages"][stage]["compute"] for s in run["steps"]) / 4)
        assert mean["peak_held"] == max(step["peak_held"][stage] for step in run["steps"])


def test_a_run_has_one_summary_that_names_its_slowest_step(path: Path) -> None:
    (run,) = json.loads(rrfp("trace", path, "--json").stdout)
    text = rrfp("trace", path).stdout
    slowest = run["slowest_step"]
    times = [step["stages"][0]["step"] * 1e3 for step in run["steps"]]
    head = f"{path}: bf, 4 steps, mean {sum(times) / 4:.1f} ms; slowest: step {slowest}, {times[slowest]:.1f} ms"
    assert text.splitlines()[0] == head
    assert text.count("stage compute") == 1
    (row,) = [line.split() for line in text.splitlines() if line.startswith("1 ")]
    assert row[1] == f"{run['mean'][1]['compute'] * 1e3:.1f}"


def test_step_shows_single_steps(path: Path) -> None:
    (run,) = json.loads(rrfp("trace", path, "--json").stdout)
    text = rrfp("trace", path, "--step", "3", "--step", "1").stdout
    heads = [line for line in text.splitlines() if ": bf" in line]
    assert heads == [f"{path}: bf, step {n}, {run['steps'][n]['stages'][0]['step'] * 1e3:.1f} ms" for n in (3, 1)]
    rows = [line.split() for line in text.splitlines() if line.startswith("0 ")]
    assert [row[1] for row in rows] == [f"{run['steps'][n]['stages'][0]['compute'] * 1e3:.1f}" for n in (3, 1)]
    assert rrfp("trace", path, "--step", "all").stdout.count("stage compute") == 4
    chosen = json.loads(rrfp("trace", path, "--step", "2", "--json").stdout)
    assert [step["step"] for step in chosen[0]["steps"]] == [2]


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("7", "bf has no step 7, must be one of: 0 to 3, 6"),
        ("-1", "--step is '-1', must be the number of a step, or all"),
        ("1.0", "--step is '1.0', must be the number of a step, or all"),
        ("\u00b2", "--step is '\u00b2', must be the number of a step, or all"),
    ],
)
def test_an_unknown_step_is_refused_with_the_steps_that_there_are(tmp_path: Path, step: str, message: str) -> None:
    path = tmp_path / "trace.json"
    write_chrome(path, traces([0, 1, 2, 3, 6]), name="bf")
    for form in ((), ("--json",)):
        result = rrfp("trace", path, f"--step={step}", *form)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith("rrfp: ")
        assert result.stderr.endswith(f"{message}\n")


def test_files_of_one_runs_ranks_are_one_summary(tmp_path: Path) -> None:
    steps = traces([0, 1])
    paths = [tmp_path / f"rank-{stage}.json" for stage in range(3)]
    for stage, path in enumerate(paths):
        write_chrome(path, [of_stage(step, stage) for step in steps])
    write_chrome(tmp_path / "whole.json", steps)
    (run,) = json.loads(rrfp("trace", *reversed(paths), "--json").stdout)
    (whole,) = json.loads(rrfp("trace", tmp_path / "whole.json", "--json").stdout)
    assert run["files"] == [str(path) for path in paths]
    for mine, theirs in zip(run["mean"], whole["mean"], strict=True):
        assert (mine["stage"], mine["peak_held"]) == (theirs["stage"], theirs["peak_held"])
        assert mine["compute"] == pytest.approx(theirs["compute"], abs=1e-7)
    text = rrfp("trace", *paths).stdout
    assert text.startswith(f"{paths[0]} and 2 more (ranks of one run): pipeline, 2 steps, mean ")
    assert text.count("stage compute") == 1


def test_a_file_of_one_rank_has_no_row_for_other_stages(tmp_path: Path) -> None:
    path = tmp_path / "rank-2.json"
    write_chrome(path, [of_stage(step, 2) for step in traces([0])])
    assert [line[0] for line in rrfp("trace", path).stdout.splitlines() if line[:1].isdigit()] == ["2"]
    (run,) = json.loads(rrfp("trace", path, "--json").stdout)
    assert [stage["stage"] for stage in run["steps"][0]["stages"]] == [2]


def test_files_that_are_no_ranks_of_one_run_have_a_summary_each(tmp_path: Path) -> None:
    """The same stages twice, other steps, another name."""
    first, again, later, other = (tmp_path / f"{name}.json" for name in ("first", "again", "later", "other"))
    write_chrome(first, traces([0, 1]))
    write_chrome(again, traces([0, 1]))
    write_chrome(later, [of_stage(step, 0) for step in traces([2])])
    write_chrome(other, [of_stage(step, 1) for step in traces([2])], name="other")
    runs = json.loads(rrfp("trace", first, again, later, other, "--json").stdout)
    assert sorted(run["file"] for run in runs) == sorted(map(str, (first, again, later, other)))
    assert all(len(run["files"]) == 1 for run in runs)


def test_trace_of_a_file_with_several_runs(tmp_path: Path) -> None:
    trace = simulate(make_costs("llm", 2, 3), hint="bf").result.trace()
    path = tmp_path / "trace.json"
    events = [*chrome_events([trace], name="a", pid=1), *chrome_events([trace], name="b", pid=2)]
    path.write_text(json.dumps({"traceEvents": events}))
    assert [run["run"] for run in json.loads(rrfp("trace", path, "--json").stdout)] == ["a", "b"]


@pytest.mark.parametrize("columns", [80, 60])
def test_no_head_is_cut_in_a_narrow_terminal(path: Path, columns: int) -> None:
    command = [sys.executable, "-m", "rrfp.cli", "trace", str(path)]
    environment = {**os.environ, "COLUMNS": str(columns)}
    text = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=50, check=True).stdout
    assert "\u2026" not in text
    assert all(len(line) <= columns for line in text.splitlines()[1:])
    assert {"compute", "input", "memory", "other", "blocked", "held"} <= set(text.split())


PNG = b"\x89PNG\r\n\x1a\n"


def test_a_timeline_shows_the_step_of_median_length_or_those_of_step(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = tmp_path / "step.png"
    drawn: list[tuple[list[str], TimeWindow]] = []

    def record(rows: Sequence[tuple[str, StepTrace]], file: Path, window: TimeWindow, names: Sequence[str]) -> None:
        assert not names
        drawn.append(([title for title, _ in rows], window))
        assert file == picture

    monkeypatch.setattr("rrfp.lab.traces.timeline.plot_timelines", record)
    makespans = {simulated(step).makespan: step for step in range(4)}
    median = makespans[sorted(makespans)[1]]
    for options in ((), ("--step", "2", "--step", "0"), ("--step", "all", "--from", "10", "--to", "20.5")):
        assert rrfp("trace", path, "--timeline", picture, *options).exit_code == 0
    assert drawn == [
        ([f"bf, step {median} (median length)"], TimeWindow()),
        (["bf, step 2", "bf, step 0"], TimeWindow()),
        ([f"bf, step {step}" for step in range(4)], TimeWindow(0.01, 0.0205)),
    ]


def test_the_timeline_is_a_png_beside_the_table(path: Path, tmp_path: Path) -> None:
    result = rrfp("trace", path, "--timeline", tmp_path / "step.png", "--from", "20", "--to", "60")
    assert (result.exit_code, "stage compute" in result.stdout) == (0, True)
    assert (tmp_path / "step.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize("command", ["trace", "simulate"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--from", "3"), "--from goes with --timeline"),
        (("--to", "3"), "--to goes with --timeline"),
        (("--timeline", "t.png", "--from", "-1"), "from is -1 ms, must be 0 ms or more"),
        (("--timeline", "t.png", "--from", "7", "--to", "6"), "to is 6 ms, must be more than from (7 ms)"),
        (("--timeline", "t.png", "--from", "nan"), "from is nan ms, must be 0 ms or more"),
        (("--timeline", "t.png", "--from", "9e9"), "from is 9e+09 ms, must be less than the step's"),
        (("--timeline", "t.png", "--from", "soon"), "--from is 'soon', must be a number"),
        (("--timeline", "absent/t.png"), "absent/t.png: cannot be written"),
    ],
)
def test_a_wrong_part_of_a_step_is_refused_and_nothing_is_written(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, options: Sequence[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_costs("costs.json", make_costs("mllm", 2, 3))
    arguments = {"trace": (path,), "simulate": ("--costs", "costs.json", "--hint", "bf")}[command]
    result = rrfp(command, *arguments, *options)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert message in result.stderr
    assert not Path("t.png").exists()


def test_the_story_of_a_task_has_its_moments_with_their_times(tmp_path: Path) -> None:
    """Every task takes a second, every message half of one."""
    ones, path = [[1.0, 1.0]] * 3, tmp_path / "trace.json"
    step = simulate(table(ones, ones, latency=0.5), hint="bf", limit=2).result.trace(0)
    write_chrome(path, [step], name="bf")
    result = rrfp("trace", path, "--task", "B0@1")
    assert (result.exit_code, result.stdout.splitlines()) == (
        0,
        [
            f"{path}: bf, step 0, B0@1:",
            "   1500.000 ms  F0@1 began after 0 tasks",
            "   5500.000 ms  B0@2 arrived after 2 tasks",
            "   5500.000 ms  began after 2 tasks",
            "   6500.000 ms  completed after 3 tasks",
        ],
    )


@pytest.mark.parametrize("split", [False, True])
def test_stories_of_all_tasks_are_told_in_order_of_time(split: bool, tmp_path: Path) -> None:
    costs, path = make_costs("mllm", 3, 6, chunks=2, jitter="J2", latency="spike", split=split), tmp_path / "trace.json"
    step = simulate(costs, hint="bfw" if split else "bf", limit=2).result.trace(0)
    write_chrome(path, [step])
    for span in step.tasks[::7]:
        (answer,) = json.loads(rrfp("trace", path, "--task", str(span.task), "--json").stdout)
        times = [moment["seconds"] for moment in answer["story"]]
        began = next(each["seconds"] for each in answer["story"] if each["what"].startswith("began"))
        assert times == sorted(times)
        assert began == pytest.approx(span.start - step.start, abs=1e-6)


def test_a_story_needs_a_task_that_ran_and_a_step_that_trained(path: Path, tmp_path: Path) -> None:
    result = rrfp("trace", path, "--task", "F9@1", "--step", "2")
    assert (result.exit_code, "task is F9@1, which did not run in step 2" in result.stderr) == (2, True)
    (step,) = traces([0])
    forwards = tuple(span for span in step.tasks if span.task.kind is Kind.F)
    write_chrome(tmp_path / "evaluation.json", [replace(step, tasks=forwards, messages=())])
    result = rrfp("trace", tmp_path / "evaluation.json", "--task", "F0@1")
    assert (result.exit_code, "step 0 is an evaluation" in result.stderr) == (2, True)
