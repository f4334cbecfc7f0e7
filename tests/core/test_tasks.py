"""Task ids print and parse; placements and graphs are data."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from core_script import T

from rrfp import StageProgram, Topology
from rrfp.costs import CostTable
from rrfp.errors import ConfigError
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import Layout, Placement
from rrfp.model.tasks import ENDING_KINDS, KINDS, LOCAL_KINDS, SENT_TO, Kind, Mode, Side, StepId, Task


@pytest.mark.parametrize("task", [Task(kind, m, v) for kind in Kind for m, v in [(0, 0), (3, 5), (120, 64)]], ids=str)
def test_a_task_parses_back_from_its_text(task: Task) -> None:
    assert Task.parse(str(task)) == task


def test_a_task_prints_kind_microbatch_and_virtual_stage() -> None:
    assert str(Task(Kind.F, 3, 5)) == "F3@5"


@pytest.mark.parametrize("text", ["", "F3", "X3@5", "f3@5", "F03@5", "F3@5 ", "F-1@0", "F3@٣", 3, None, b"F3@5"])
def test_text_that_is_no_task_is_refused_and_quoted(text: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        Task.parse(text)
    assert str(caught.value) == f"task {text!r} is not of the form F3@5: F, B or W, microbatch, '@', virtual stage"


def test_the_table_of_kinds_has_each_with_its_program_method_costs_and_graph_option() -> None:
    assert tuple(KINDS) == tuple(Kind)
    costs = {field.name for field in fields(CostTable)}
    for row in KINDS.values():
        assert callable(getattr(StageProgram, row.name))
        assert row.name in costs
        assert row.option is None or getattr(TaskGraph.chain(2), row.option) == (False, False)
    assert SENT_TO == {Kind.F: Side.AFTER, Kind.B: Side.BEFORE}
    assert LOCAL_KINDS == ENDING_KINDS == (Kind.W,)


def test_a_step_prints_its_number_mode_and_size() -> None:
    assert str(StepId(4, Mode.TRAIN, 8)) == "step 4 (train, 8 microbatches)"


@pytest.mark.parametrize(
    ("layout", "stages"), [("looped", [(0, 3, 6), (1, 4, 7), (2, 5, 8)]), ("v", [(0, 5, 6), (1, 4, 7), (2, 3, 8)])]
)
def test_placement_puts_chunks_on_stages(layout: Layout, stages: list[tuple[int, ...]]) -> None:
    placement = Placement(3, 3, layout)
    assert [placement.virtual_stages(stage) for stage in range(3)] == stages
    assert [[placement.stage_of(v) for v in of_one] for of_one in stages] == [[stage] * 3 for stage in range(3)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1, "looped"), "stages is 0, must be at least 1"),
        ((1, 0, "looped"), "chunks is 0, must be at least 1"),
        ((1, 1, "zigzag"), "placement is 'zigzag', must be one of: looped, v"),
    ],
)
def test_an_impossible_placement_is_refused_by_name(arguments: tuple[int, int, Layout], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Placement(*arguments)
    assert str(caught.value) == message


def test_topology_reads_the_launchers_environment() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "job"}
    topology = Topology.from_env(environ | {"TORCHELASTIC_RESTART_COUNT": "3"})
    assert topology == Topology(stage=1, stages=4, run_id="job", restart=3, local_world_size=2)
    assert not topology.single_host


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {},
            "environment variable RANK is not set; "
            "launch with: torchrun --standalone --nproc-per-node STAGES script.py",
        ),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "environment variable RANK is 'one', must be a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "environment variable RANK is 2, must be below WORLD_SIZE, which is 2"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "environment variable RANK is 0, must be below WORLD_SIZE, which is 0"),
    ],
)
def test_a_wrong_environment_is_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Topology.from_env(environ)
    assert str(caught.value) == message


def test_a_topology_of_wrong_types_is_refused_by_field() -> None:
    wrong: Any = "0"
    with pytest.raises(ConfigError, match=r"stage is '0', must be a whole number 0\.\.1"):
        Topology(wrong, 2)
    with pytest.raises(ConfigError, match="stages is '0', must be a whole number >= 1"):
        Topology(0, wrong)
    with pytest.raises(ConfigError, match=r"dims is \['pp'\], must be a dict with the size of each dim"):
        Topology.from_env({"RANK": "0", "WORLD_SIZE": "1"}, dims=["pp"])  # type: ignore[arg-type]


def test_numbers_of_numpy_are_plain_ones_in_a_topology() -> None:
    place: Any = Topology(np.int64(1), np.int64(2))  # type: ignore[arg-type]
    assert place == Topology(1, 2)
    assert (type(place.stage), type(place.stages)) == (int, int)


def test_the_chain_feeds_each_virtual_stage_from_the_one_before() -> None:
    graph = TaskGraph.chain(2, chunks=2, split=True)
    assert graph.edges == ((0, 1), (1, 2), (2, 3))
    assert {
        str(task): " ".join(map(str, graph.inputs(task))) for task in map(T, ("F1@0", "F1@2", "B1@2", "B1@3", "W1@2"))
    } == {
        "F1@0": "",
        "F1@2": "F1@1",
        "B1@2": "F1@2 B1@3",
        "B1@3": "F1@3",
        "W1@2": "B1@2",
    }


def test_a_skip_edge_adds_a_reader_and_a_gradient() -> None:
    graph = TaskGraph(Placement(3), edges=((0, 1), (1, 2), (0, 2)))
    assert graph.inputs(T("F0@2")) == (T("F0@1"), T("F0@0"))
    assert graph.inputs(T("B0@0")) == (T("F0@0"), T("B0@1"), T("B0@2"))
    assert graph.consumers(Kind.F, 0, Mode.TRAIN) == ((Kind.F, 1), (Kind.F, 2), (Kind.B, 0))
    assert graph.consumers(Kind.B, 2, Mode.TRAIN) == ((Kind.B, 1), (Kind.B, 0))
    assert graph.neighbours(0) == [1, 2]


def test_each_virtual_stage_is_split_or_not() -> None:
    graph = TaskGraph(Placement(2), split=(True, False))
    assert [" ".join(map(str, graph.tasks(stage, 1))) for stage in range(2)] == ["F0@0 B0@0 W0@0", "F0@1 B0@1"]
    assert [" ".join(map(str, graph.tasks(stage, 1, Mode.FORWARD))) for stage in range(2)] == ["F0@0", "F0@1"]
    assert [graph.last_kind(v, Mode.TRAIN) for v in range(2)] == [Kind.W, Kind.B]


@pytest.mark.parametrize(
    ("edges", "split", "message"),
    [
        (((1, 0),), (), "edge (1, 0) must go upward between virtual stages 0..1"),
        (((0, 2),), (), "edge (0, 2) must go upward between virtual stages 0..1"),
        (((0, 1), (0, 1)), (), "edge (0, 1) occurs twice"),
        (None, (True,), "split has 1 entries, must have 2, one for each virtual stage"),
    ],
)
def test_an_impossible_graph_is_refused(
    edges: tuple[tuple[int, int], ...] | None, split: tuple[bool, ...], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        TaskGraph(Placement(2), edges=edges, split=split)
    assert str(caught.value) == message
