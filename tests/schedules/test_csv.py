"""Schedules in and out of the compute-only CSV grammar of torch.distributed.pipelining."""

from __future__ import annotations

import csv

import pytest
from core_script import T
from torch.distributed.pipelining.schedules import _Action

from rrfp.core.graph import Graph
from rrfp.core.schedule import Schedule
from rrfp.core.topology import Placement
from rrfp.errors import ConfigError
from rrfp.schedules.csv import from_csv, to_csv
from rrfp.schedules.registry import make_schedule

UNSPLIT, SPLIT = Graph.chain(2), Graph.chain(2, split=True)
MIXED = Graph(Placement(2), split=(False, True))


def order_of(text: str) -> tuple[object, ...]:
    return tuple(map(T, text.split()))


def test_an_unsplit_backward_is_written_as_torchs_b() -> None:
    assert to_csv(make_schedule("1f1b", UNSPLIT, 2), UNSPLIT) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def test_a_split_backward_is_written_as_torchs_i_and_w() -> None:
    assert to_csv(make_schedule("1f1b", MIXED, 1), MIXED) == "0F0,0B0\n1F0,1I0,1W0\n"


@pytest.mark.parametrize("graph", [UNSPLIT, SPLIT, MIXED])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_what_was_written_reads_back(name: str, graph: Graph) -> None:
    schedule = make_schedule(name, graph, 3)
    assert from_csv(to_csv(schedule, graph), graph, name) == schedule


@pytest.mark.parametrize(
    ("name", "graph"),
    [
        ("interleaved-1f1b", Graph.chain(2, chunks=2)),
        ("zb-h1", SPLIT),
        ("zb-h1", MIXED),
        ("zb-v", Graph.chain(2, chunks=2, layout="v", split=True)),
    ],
)
def test_what_has_chunks_or_places_weight_tasks_reads_back(name: str, graph: Graph) -> None:
    schedule = make_schedule(name, graph, 5)
    assert from_csv(to_csv(schedule, graph), graph, name) == schedule


@pytest.mark.parametrize("graph", [UNSPLIT, SPLIT])
def test_torch_reads_every_cell_as_we_mean_it(graph: Graph) -> None:
    schedule = make_schedule("1f1b", graph, 3)
    torchs = {"F": "FORWARD", "B": "BACKWARD_INPUT" if graph.split[0] else "FULL_BACKWARD", "W": "BACKWARD_WEIGHT"}
    for order, row in zip(schedule.orders, csv.reader(to_csv(schedule, graph).splitlines()), strict=True):
        actions = [_Action.from_str(cell) for cell in row]
        assert [str(action) for action in actions] == row
        assert [(a.stage_index, a.computation_type.name, a.microbatch_index) for a in actions] == [
            (task.virtual_stage, torchs[task.kind], task.microbatch) for task in order
        ]


def test_torchs_b_means_b_and_w_together_on_a_split_stage() -> None:
    schedule = from_csv("0F0,0B0\n1F0,1B0\n", MIXED)
    assert schedule == Schedule("csv", (order_of("F0@0 B0@0"), order_of("F0@1 B0@1 W0@1")))  # type: ignore[arg-type]


def test_idle_cells_and_blanks_mean_nothing() -> None:
    schedule = from_csv("0F0,, 0B0 ,\n,1F0,1B0,\n", UNSPLIT)
    assert schedule.orders == (order_of("F0@0 B0@0"), order_of("F0@1 B0@1"))


@pytest.mark.parametrize(
    "cell",
    ["0X0", "F0", "0F", "0f0", "-1F0", "0F0;", "0FB0", "0BI0", "0SEND_F1", "1UNSHARD", "(0F0;1B1)OVERLAP_F_B", "٣F0"],
)
def test_a_bad_cell_is_named_by_row_and_column(cell: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_csv(f"0F0,0B0\n1F0,1B0,{cell}\n", UNSPLIT, "mine")
    where = "schedule mine: row 1, column 2"
    assert str(caught.value) == f"{where}: {cell!r} is not a compute action such as 2F0 (types F, B, I, W)"


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        ("2F0", "virtual stages are 0..1"),
        ("0I0", "the backward of virtual stage 0 is not split"),
        ("0W0", "the backward of virtual stage 0 is not split"),
    ],
)
def test_a_cell_that_does_not_fit_the_graph_is_named_by_row_and_column(cell: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_csv(f"{cell}\n1F0\n", MIXED)
    assert str(caught.value) == f"schedule csv: row 0, column 0: {cell!r}: {reason}"


@pytest.mark.parametrize("rows", [1, 3])
def test_a_row_for_each_stage_is_needed(rows: int) -> None:
    with pytest.raises(ConfigError) as caught:
        from_csv("0F0\n" * rows, UNSPLIT)
    assert str(caught.value) == f"schedule csv: has {rows} rows, must have 2, one for each stage"
