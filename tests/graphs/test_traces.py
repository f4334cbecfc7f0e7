"""Traces of graphs: the file has the graph, and its costs, picture and tables are those of the parts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphs.graph_models import Model, loss_fn, model
from runtime.ranks import ThreadedRanks
from typer.testing import CliRunner

import rrfp
from rrfp.commands.app import app
from rrfp.costs import read_costs
from rrfp.errors import ConfigError
from rrfp.lab.generators.multimodal import multimodal_costs
from rrfp.lab.simulation import simulate
from rrfp.lab.traces.chrome_reader import TracedRun, read_chrome
from rrfp.lab.traces.measured_costs import measured_costs, traced_step
from rrfp.lab.traces.timeline import draw_timelines
from rrfp.model.model_graph import ModelGraph
from rrfp.model.tasks import Kind
from rrfp.pipeline.faces import BlockingPipeline
from rrfp.trace.chrome import write_chrome
from rrfp.trace.spans import skips

STEPS = 4
SIZES = [3, 1, 4, 1.5]


def traced(own: Model, path: Path, **options: Any) -> TracedRun:
    """The run of a pipeline of ``own``, as its file has it."""

    def body(stage: int, pipe: BlockingPipeline) -> None:
        for _ in range(STEPS):
            pipe.step(own.inputs, own.targets, visits=own.visits, sizes=SIZES)
        pipe.save_trace(path)

    outcomes = ThreadedRanks(own.by_stage(), body, graph=own.graph, loss_fn=loss_fn, **options).join()
    assert [outcome.error for outcome in outcomes] == [None] * own.stages
    [run] = read_chrome(path)
    return run


@pytest.mark.parametrize(("name", "split"), [("colocated", False), ("two_sources", True), ("unet", False)])
def test_a_saved_trace_has_the_graph_and_what_was_skipped(name: str, split: bool, tmp_path: Path) -> None:
    own = model(name)
    run = traced(own, tmp_path / "t.json", split=split)
    parts = ModelGraph.of(own.graph)
    assert run.graph == parts.tasks
    assert run.num_stages == own.stages
    assert [step.skipped for step in run.steps] == [skips(parts.visits_of(own.visits, 4).skipped)] * STEPS
    measured = measured_costs([("t", run)])
    table = measured.table
    assert table.graph is not None
    assert table.graph.names == parts.tasks.names
    assert table.skipped == parts.visits_of(own.visits, 4).skipped
    assert table.sizes == tuple(SIZES)
    assert (measured.filled, table.split) == (0, split)
    step = next(each for each in run.steps if each.step == measured.step)
    for span in step.tasks:
        kind, m, v = span.task
        assert table.duration(kind, v, m) == pytest.approx(span.end - span.start)
    assert measured.measured == len(step.messages)
    assert simulate(table, hint="bf", limit="2n").makespan > 0


def test_the_costs_of_a_simulated_graph_come_back(tmp_path: Path) -> None:
    table = multimodal_costs("colocated", 4, 6)
    trace = replace(simulate(table, hint="bf", limit="2n").result.trace(), skipped=skips(table.skipped))
    write_chrome(tmp_path / "t.json", [trace], graph=table.graph)
    [run] = read_chrome(tmp_path / "t.json")
    ours = measured_costs([("t", run)], skip_first=0).table
    assert (ours.graph and ours.graph.names, ours.skipped) == (table.graph and table.graph.names, table.skipped)
    for mine, theirs in ((ours.forward, table.forward), (ours.backward, table.backward)):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=2e-9)


def test_tasks_have_their_parts_and_arrows_lead_to_readers(tmp_path: Path) -> None:
    run = traced(model("colocated"), path := tmp_path / "t.json")
    assert run.graph is not None
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["name"] for event in events if event.get("cat") == "computation"}
    assert {"F1@2 (audio.0)", "B0@1 (vision.1)", "F3@5 (lm.1)"} <= names
    assert "F0@2 (audio.0)" not in names  # skipped
    [step] = [event["args"] for event in events if event["name"] == f"step {STEPS - 1}"]
    assert step["skipped"] == {name: [2, 3] for name in ("vision.0", "vision.1")} | {
        name: [0, 2] for name in ("audio.0", "audio.1")
    }


def test_the_picture_names_the_parts(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = traced(model("colocated"), tmp_path / "t.json")
    assert run.graph is not None
    figure = draw_timelines([("graph", run.steps[-1])], names=run.graph.names)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[:2] == ["forward: vision, audio, lm", "backward: vision, audio, lm"]


def test_the_commands_read_a_trace_of_a_graph(tmp_path: Path) -> None:
    traced(model("two_sources"), path := tmp_path / "t.json")
    shown = CliRunner().invoke(app, ["trace", str(path), "--timeline", str(tmp_path / "t.svg")])
    assert shown.exit_code == 0, shown.output
    out = tmp_path / "costs.json"
    made = CliRunner().invoke(app, ["costs", str(path), "--out", str(out)])
    assert made.exit_code == 0, made.output
    assert "vision.1 (stage 1)" in made.output
    assert read_costs(out).graph is not None
    assert CliRunner().invoke(app, ["simulate", "--costs", str(out), "--hint", "bf"]).exit_code == 0


def test_a_step_that_lacks_or_has_a_wrong_task_is_refused(tmp_path: Path) -> None:
    run = traced(model("two_sources"), tmp_path / "t.json")
    step, graph = run.steps[0], run.graph
    without = replace(step, tasks=tuple(span for span in step.tasks if str(span.task) != "F0@2"))
    with pytest.raises(ConfigError, match="F0@2 is missing"):
        traced_step(without, run.num_stages, graph)
    with pytest.raises(ConfigError, match="F0@0 ran, and its microbatch skips that virtual stage"):
        traced_step(replace(step, skipped=((0, 0), *step.skipped)), run.num_stages, graph)
    moved = tuple(replace(span, stage=1) if span.task.kind is Kind.F else span for span in step.tasks)
    with pytest.raises(ConfigError, match="ran on stage 1, and the graph has that virtual stage on stage"):
        traced_step(replace(step, tasks=moved), run.num_stages, graph)


def test_steps_that_skip_other_parts_have_no_median(tmp_path: Path) -> None:
    own = model("two_sources")
    with rrfp.local(own.by_stage(), graph=own.graph, loss_fn=loss_fn).blocking() as pipe:
        pipe.step(own.inputs, own.targets, visits=own.visits)
        pipe.step(own.inputs, own.targets)
        pipe.save_trace(tmp_path / "t.json")
    [run] = read_chrome(tmp_path / "t.json")
    with pytest.raises(ConfigError, match="step is 'median', and microbatches skip other parts in one step"):
        measured_costs([("t", run)], skip_first=0, step="median")
    assert measured_costs([("t", run)], skip_first=0, step=1).table.skipped == ()


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("graph", 3, "args.graph is 3, must be an object with stages, virtual_stages, placement, edges"),
        ("graph", {"stages": 1, "virtual_stages": ["a"], "placement": [1], "edges": []}, "placement[0] is 1"),
        ("skipped", {"c": [0]}, "args.skipped is {'c': [0]}, must be lists of microbatches by virtual stage: a, b"),
        ("skipped", {"a": 2}, "args.skipped.a is 2, must be a list of microbatches"),
    ],
)
def test_a_graph_in_a_file_that_is_none_is_refused(field: str, value: Any, text: str, tmp_path: Path) -> None:
    graph = {"stages": 2, "virtual_stages": ["a", "b"], "placement": [0, 1], "edges": ["a -> b"]}
    name, step = {"name": "run", "graph": graph}, {"step": 0, "skipped": {}}
    (name if field == "graph" else step)[field] = value
    events = [
        {"ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": name},
        {"ph": "X", "cat": "step", "name": "step 0", "pid": 1, "tid": 0, "ts": 0, "dur": 2, "args": step},
    ]
    (path := tmp_path / "t.json").write_text(json.dumps({"traceEvents": events}))
    with pytest.raises(ConfigError) as caught:
        read_chrome(path)
    assert text in str(caught.value)
