"""Schedules in and out of the compute-only CSV grammar of torch.distributed.pipelining."""

from __future__ import annotations

import csv

import pytest
from core_script import T
from torch.distributed.pipelining.schedules import _Action

from rrfp.costs import make_costs
from rrfp.errors import ConfigError
from rrfp.hints.registry import create_strict
from rrfp.lab.cluster.random_run import RandomRun
from rrfp.lab.cluster.simulation import simulate_tensor_parallel
from rrfp.lab.simulation import simulate
from rrfp.memory.admission import Limit
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import Placement, TablePlacement
from rrfp.model.schedule import Schedule
from rrfp.model.tasks import Mode
from rrfp.model.visits import Visits
from rrfp.schedules.csv import CsvSchedule, from_csv, to_csv
from rrfp.schedules.registry import make_schedule

UNSPLIT, SPLIT = TaskGraph.chain(2), TaskGraph.chain(2, split=True)
MIXED = TaskGraph(Placement(2), split=(False, True))


def order_of(text: str) -> tuple[object, ...]:
    return tuple(map(T, text.split()))


def test_an_unsplit_backward_is_written_as_torchs_b() -> None:
    assert to_csv(make_schedule("1f1b", UNSPLIT, 2), UNSPLIT) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def test_a_split_backward_is_written_as_torchs_i_and_w() -> None:
    assert to_csv(make_schedule("1f1b", MIXED, 1), MIXED) == "0F0,0B0\n1F0,1I0,1W0\n"


@pytest.mark.parametrize("graph", [UNSPLIT, SPLIT, MIXED])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_what_was_written_reads_back(name: str, graph: TaskGraph) -> None:
    schedule = make_schedule(name, graph, 3)
    assert from_csv(to_csv(schedule, graph), graph, name) == schedule


@pytest.mark.parametrize(
    ("name", "graph"),
    [
        ("interleaved-1f1b", TaskGraph.chain(2, chunks=2)),
        ("zb-h1", SPLIT),
        ("zb-h1", MIXED),
        ("zb-v", TaskGraph.chain(2, chunks=2, layout="v", split=True)),
    ],
)
def test_what_has_chunks_or_places_weight_tasks_reads_back(name: str, graph: TaskGraph) -> None:
    schedule = make_schedule(name, graph, 5)
    assert from_csv(to_csv(schedule, graph), graph, name) == schedule


@pytest.mark.parametrize("graph", [UNSPLIT, SPLIT])
def test_torch_reads_every_cell_as_we_mean_it(graph: TaskGraph) -> None:
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
    [
        "0X0",
        "F0",
        "0F",
        "0f0",
        "-1F0",
        "0F0;",
        "0FB0",
        "0BI0",
        "0SEND_F1",
        "1UNSHARD",
        "(0F0;1B1)OVERLAP_F_B",
        "٣F0",
        f"0F{'9' * 5000}",
    ],
)
def test_a_bad_cell_is_named_by_line_and_column(cell: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_csv(f"0F0,0B0\n1F0,1B0,{cell}\n", UNSPLIT, "mine")
    where = "schedule mine: line 2, column 3"
    forms = "a virtual stage, a type (F, B, I or W) and a microbatch, such as 2F0"
    assert str(caught.value) == f"{where}: {cell!r} must be {forms}"


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        ("2F0", "the virtual stages of this line are 0"),
        ("1F0", "the virtual stages of this line are 0"),
        ("0I0", "the backward of virtual stage 0 is not split: F or B"),
        ("0W0", "the backward of virtual stage 0 is not split: F or B"),
    ],
)
def test_a_cell_that_does_not_fit_the_graph_is_named_by_line_and_column(cell: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_csv(f"{cell}\n1F0\n", MIXED)
    assert str(caught.value) == f"schedule csv: line 1, column 1: {cell!r}: {reason}"


@pytest.mark.parametrize("rows", [1, 3])
def test_a_line_for_each_stage_is_needed(rows: int) -> None:
    with pytest.raises(ConfigError) as caught:
        from_csv("0F0\n" * rows, UNSPLIT)
    assert str(caught.value) == f"schedule csv: number of lines is {rows}, must be 2, one for each stage"


def test_blank_lines_at_the_end_are_no_stages() -> None:
    assert from_csv("0F0,0B0\r\n1F0,1B0\r\n\r\n \n", UNSPLIT).orders == (order_of("F0@0 B0@0"), order_of("F0@1 B0@1"))


def test_a_line_that_is_not_csv_is_named() -> None:
    with pytest.raises(ConfigError, match=r"schedule csv: line 2: is not CSV \(field larger than field limit"):
        from_csv("0F0,0B0\n" + "1" * 200_000 + "\n", UNSPLIT)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0,0F1\n1F0,1B0,1F1,1B1", "stage 0 misses 1 task(s), the first is B1@0"),
        ("0F0,0B0,0F0,0F1,0B1\n1F0,1B0,1F1,1B1", "stage 0, entry 0: F0@0 occurs 2 times"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1,1F2", "stage 1, entry 4: F2@1 does not run on this stage"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", "deadlocks: stage 0, entry 1: B0@0 waits for B0@1"),
    ],
)
def test_a_schedule_file_that_is_no_complete_order_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_schedule(CsvSchedule("mine.csv", text), UNSPLIT, 2)
    assert str(caught.value).startswith("schedule mine.csv")
    assert message in str(caught.value)
    assert "stage i is line i + 1" in str(caught.value)


def test_a_schedule_file_runs_as_the_schedule_that_was_written() -> None:
    costs = make_costs("mllm", 3, 6, split=True, jitter="J2", latency="spike")
    graph = TaskGraph.chain(3, split=True)
    text = to_csv(make_schedule("zb-h1", graph, 6), graph)
    assert simulate(costs, strict=CsvSchedule("mine.csv", text)) == simulate(costs, strict="zb-h1")
    grouped = simulate_tensor_parallel(costs, 2, strict=CsvSchedule("mine.csv", text)).result
    assert grouped == simulate_tensor_parallel(costs, 2, strict="zb-h1").result


def test_a_schedule_file_for_a_graph_runs_strictly_without_what_microbatches_skip() -> None:
    """0 and 1 feed 2; the second microbatch skips 1."""
    branch = TaskGraph(TablePlacement((0, 1, 2)), ((0, 2), (1, 2)))
    text = "0F0,0F1,0B0,0B1\n1F1,1F0,1B1,1B0\n2F0,2B0,2F1,2B1"
    hints = [create_strict(CsvSchedule("branch.csv", text)) for _ in range(3)]
    network = RandomRun(branch, hints, [Limit()] * 3, visits=[Visits(2, (frozenset(), frozenset({1})))])
    network.run([(Mode.TRAIN, 2)])
    assert [" ".join(map(str, steps[0])) for steps in network.orders] == [
        "F0@0 F1@0 B0@0 B1@0",
        "F0@1 B0@1",
        "F0@2 B0@2 F1@2 B1@2",
    ]
