"""Every output that another stage reads is sent once, and arrives in any order."""

from __future__ import annotations

import pytest
from core_script import Script

from rrfp.core.events import Send
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import Placement
from rrfp.model.tasks import Kind, Mode, Task

SKIPPING = TaskGraph(Placement(3), ((0, 1), (1, 2), (0, 2)))
HERE = "step 0 (train, 3 microbatches)"


def sent(graph: TaskGraph, stage: int, mode: Mode, microbatches: int) -> list[tuple[Task, int]]:
    """What ``stage`` sends in a step in which everything arrives at once."""
    script = Script(graph, stage, microbatches, mode)
    own = [*graph.tasks(stage, microbatches, mode)]
    needed = {source for task in own for source in graph.inputs(task)} - {*own}
    instructions = script.arrived(*map(str, sorted(needed)))
    while (run := script.core.decide()) is not None:
        instructions += script.ran(str(run.task))
    return [(one.task, one.peer) for one in instructions if isinstance(one, Send)]


@pytest.mark.parametrize("mode", [*Mode])
@pytest.mark.parametrize(
    "graph",
    [
        TaskGraph.chain(3),
        TaskGraph.chain(3, split=True),
        TaskGraph.chain(2, chunks=2),
        TaskGraph.chain(2, chunks=2, layout="v"),
        SKIPPING,
    ],
)
def test_every_output_goes_once_to_every_stage_that_reads_it(graph: TaskGraph, mode: Mode) -> None:
    microbatches, where = 4, graph.placement.stage_of
    for stage in range(graph.placement.stages):
        expected = {
            (task, where(reader))
            for task in graph.tasks(stage, microbatches, mode)
            for _, reader in graph.consumers(task.kind, task.virtual_stage, mode)
            if where(reader) != stage
        }
        actual = sent(graph, stage, mode, microbatches)
        assert len(actual) == len(set(actual))
        assert set(actual) == expected


def test_outputs_come_in_any_order() -> None:
    script = Script(TaskGraph.chain(3), stage=1, microbatches=3)
    script.arrived("F2@0", "F0@0", "F1@0")
    assert script.ready == " ".join(str(Task(Kind.F, m, 1)) for m in range(3))


@pytest.mark.parametrize("readers", [1, 255, 256, 300])
def test_an_output_may_go_to_any_number_of_stages_and_their_gradients_are_all_awaited(readers: int) -> None:
    stages = range(1, readers + 1)
    script = Script(TaskGraph(Placement(readers + 1), tuple((0, stage) for stage in stages)), microbatches=1)
    assert [one.peer for one in script.ran("F0@0") if isinstance(one, Send)] == [*stages]
    for stage in stages:
        assert script.core.decide() is None
        script.arrived(f"B0@{stage}")
    run = script.core.decide()
    assert run is not None
    assert str(run.task) == "B0@0"
