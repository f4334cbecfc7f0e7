"""Every output that another stage reads is sent once; where outputs are numbered, each must be the next."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from core_script import Script, T

from rrfp.core.events import Arrived, ChunkReduced, Send
from rrfp.errors import ProtocolError
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import Placement
from rrfp.model.tasks import Kind, Mode, StepId, Task

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


def numbered(script: Script, *entries: tuple[str, int]) -> None:
    script.told(*(Arrived(script.step, T(task), sequence=sequence) for task, sequence in entries))


def middle() -> Script:
    return Script(TaskGraph.chain(3), stage=1, microbatches=3)


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        (
            [("F1@0", 1)],
            "F1@0 from stage 0 arrived before another, or that was lost: it is message 1 of its channel in "
            f"{HERE}, message 0 is due on stage 1",
        ),
        (
            [("F0@0", 0), ("F2@0", 2)],
            "F2@0 from stage 0 arrived before another, or that was lost: it is message 2 of its channel in "
            f"{HERE}, message 1 is due on stage 1",
        ),
        (
            [("F0@0", 0), ("F1@0", 1), ("F2@0", 0)],
            "F2@0 from stage 0 arrived twice or late: it is message 0 of its channel in "
            f"{HERE}, message 2 is due on stage 1",
        ),
    ],
)
def test_an_output_that_is_not_the_next_of_its_channel_is_refused(
    entries: Sequence[tuple[str, int]], text: str
) -> None:
    with pytest.raises(ProtocolError) as caught:
        numbered(middle(), *entries)
    assert str(caught.value) == text


def test_each_channel_and_each_step_is_numbered_from_0_in_whatever_order_microbatches_come() -> None:
    script = Script(TaskGraph.chain(3), stage=1, microbatches=2)
    numbered(script, ("F1@0", 0), ("B1@2", 0), ("F0@0", 1), ("B0@2", 1))
    script.ran("F1@1", "F0@1", "B1@1", "B0@1")
    script.released(2, "F1@1", "F0@1")
    script.released(0, "B1@1", "B0@1")
    script.told(ChunkReduced(1))
    script.opened(StepId(1, Mode.TRAIN, 2))
    numbered(script, ("F0@0", 0))
    assert script.ready == "F0@1"


def test_what_came_early_is_numbered_as_well() -> None:
    script = Script(TaskGraph.chain(2), stage=1, microbatches=0)
    step = StepId(0, Mode.TRAIN, 2)
    script.told(Arrived(step, T("F1@0"), sequence=1))
    with pytest.raises(ProtocolError, match="F1@0 from stage 0 arrived before another"):
        script.opened(step)


def test_outputs_without_a_number_come_in_any_order() -> None:
    script = middle()
    script.arrived("F2@0", "F0@0", "F1@0")
    assert script.ready == " ".join(str(Task(Kind.F, m, 1)) for m in range(3))
