"""The in-order banker: which forwards start where branches of a graph join, by slots and by bytes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from core_script import Script, T

from rrfp.core import events as ev
from rrfp.core.stage_core import StageCore
from rrfp.hints.priorities import BackwardForward
from rrfp.lab.explore.search import explore
from rrfp.memory.admission import Limit
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import TablePlacement
from rrfp.model.tasks import F, Kind, Mode, StepId, Task

#: Two sources of one sink, all on one stage; and each on a stage of its own.
TOGETHER = TaskGraph(TablePlacement((0, 0, 0)), ((0, 2), (1, 2)))
APART = TaskGraph(TablePlacement((0, 1, 2)), ((0, 2), (1, 2)))


def test_a_microbatch_has_room_kept_for_the_rest_of_its_forwards() -> None:
    """Three slots: until microbatch 0 has all of them no other may start; when one is free again, 1 may take it."""
    script = Script(TOGETHER, limit=1)
    assert script.ready == "F0@1 F0@0"
    script.ran("F0@1")
    assert script.ready == "F0@0"
    script.ran("F0@0", "F0@2")
    assert script.ready == "B0@2"
    script.ran("B0@2")
    assert script.ready == "F1@1 F1@0 B0@1 B0@0"
    script.ran("F1@0")
    assert (script.ready, script.core.view.held) == ("B0@1 B0@0", 3)


def test_later_microbatches_share_what_the_lower_ones_cannot_need() -> None:
    """K = 2 gives six slots, so three remain free, whichever microbatches hold the others."""
    script = Script(TOGETHER, microbatches=3, limit=2)
    assert script.ready == "F0@1 F1@1 F2@1 F0@0 F1@0 F2@0"
    script.ran("F2@1", "F2@0")
    assert script.ready == "F2@2 F0@1 F1@1 F0@0 F1@0"
    script.ran("F2@2")
    assert script.ready == "F0@1 F0@0 B2@2"


def test_slots_of_lower_microbatches_do_not_count_against_higher_ones() -> None:
    """K = 2, six slots: 0 holds three, which come back before 1 has to have its own."""
    script = Script(TOGETHER, microbatches=3, limit=2)
    script.ran("F0@0", "F0@1", "F0@2")
    assert script.ready == "F1@1 F2@1 F1@0 F2@0 B0@2"
    script.ran("F2@0", "F2@1")
    assert script.ready == "F2@2 F1@1 F1@0 B0@2"
    script.ran("F2@2")
    assert (script.ready, script.core.view.held) == ("B0@2 B2@2", 6)
    script.ran("B0@2")
    assert script.ready == "F1@1 F1@0 B2@2 B0@1 B0@0"


@pytest.mark.parametrize("stage", [0, 1])
def test_each_source_takes_the_lowest_microbatch_where_one_slot_is_there(stage: int) -> None:
    script = Script(APART, stage, microbatches=2, limit=1)
    assert script.ready == f"F0@{stage}"


def test_the_stage_below_the_join_is_plain_and_takes_any() -> None:
    script = Script(APART, 2, microbatches=2, limit=1)
    script.arrived("F1@0", "F1@1")
    assert script.ready == "F1@2"


def test_the_lowest_forward_starts_where_the_one_that_a_hint_prefers_is_blocked() -> None:
    script = Script(TOGETHER, microbatches=3, limit=1)
    script.core.ready.order_by((2, 1, 0))
    assert script.core.ready.head(F, 0) == T("F0@0")
    script.ran("F0@0")
    assert script.core.ready.head(F, 0) is None


def test_forward_only_a_slot_is_free_when_the_output_is_consumed() -> None:
    script = Script(APART, 0, mode=Mode.FORWARD, limit=1)
    script.ran("F0@0")
    assert script.ready == ""
    script.consumed(2, "F0@0")
    assert script.ready == "F1@0"


def test_with_a_forced_order_every_stage_of_a_graph_keeps_room_for_lower_microbatches() -> None:
    """Without one the sink's stage is plain; see above."""
    script = Script(APART, 2, microbatches=2, limit=1, in_order=((Kind.B, 2),))
    script.arrived("F1@0", "F1@1")
    assert script.ready == ""
    script.arrived("F0@0", "F0@1")
    assert script.ready == "F0@2"


def test_what_is_skipped_needs_no_room() -> None:
    """Three slots: microbatch 0 takes two, so that one is to spare; 2 visits all, or the graphs would have no join."""
    script = Script(TOGETHER, microbatches=3, limit=1, skipped=[{0}, {1}, ()])
    assert script.ready == "F0@1 F2@1 F1@0 F2@0"
    script.ran("F1@0")
    assert script.ready == "F0@1"


def test_without_a_join_in_any_microbatch_that_is_there_the_staircase_applies() -> None:
    script = Script(TOGETHER, limit=1, skipped=[{0}, {1}])
    assert script.ready == "F0@1 F1@0"
    script.ran("F0@1")
    assert script.ready == "F0@2"  # chunk 0 starts at D < 1


@pytest.mark.parametrize("in_order", [None, Kind.B])
@pytest.mark.parametrize("estimates", [(1, 2, 4), (0, 0, 0), (9, 1, 0), None])
def test_byte_limits_never_deadlock_whatever_is_expected(
    estimates: Sequence[int] | None, in_order: Kind | None
) -> None:
    forced = [(in_order, v) for v in range(3)] if in_order else []
    for graph in (TOGETHER, APART, TaskGraph(TablePlacement((0, 1, 0)), ((0, 2), (1, 2)))):
        for num_bytes in (1, 3, 8):
            found = explore(graph, 3, Limit(None, num_bytes), in_order=forced, sizes=(1, 2, 4), estimates=estimates)
            assert not found.deadlocks, (num_bytes, found)


def test_bytes_that_are_expected_rightly_pass_the_limit_only_for_a_microbatch_that_is_larger() -> None:
    """The first step shows what one unit of size takes; from the second on the limit holds."""
    for seed in range(30):
        rng = random.Random(seed)
        sizes = [float(rng.randint(1, 9)) for _ in range(5)]
        most = rng.randint(1, 40)
        cores = [StageCore(APART_IN_TWO, stage, BackwardForward(), Limit(bytes=most)) for stage in range(2)]
        for number in range(2):
            run_at_random(cores, StepId(number, Mode.TRAIN, len(sizes)), sizes, rng)
        for core in cores:
            chunks = APART_IN_TWO.placement.chunks_of(core.stage)
            assert core.peaks.num_bytes <= max(most, chunks * max(sizes)), (seed, core.stage)


#: Both sources and a second sink on one stage, the first sink on another.
APART_IN_TWO = TaskGraph(TablePlacement((0, 0, 1, 0)), ((0, 2), (1, 2), (2, 3)))


def run_at_random(cores: Sequence[StageCore], step: StepId, sizes: Sequence[float], rng: random.Random) -> None:
    """Any stage runs any ready task at once; each task of a microbatch leaves as many bytes as its size."""
    for core in cores:
        core.apply(ev.StepOpened(step.number, step.mode, step.microbatches, tuple(sizes)))
    while choices := [(core, task) for core in cores for task in core.ready]:
        core, task = rng.choice(choices)
        run(cores, core, task, step, int(sizes[task.microbatch]))
    assert all(core.step is not None and core.step.finished for core in cores)


def run(cores: Sequence[StageCore], core: StageCore, task: Task, step: StepId, held: int) -> None:
    core.apply(ev.Enqueued(task))
    for instruction in core.apply(ev.Completed(task, held=held)):
        if isinstance(instruction, ev.Send):
            cores[instruction.peer].apply(ev.Arrived(step, task))
            core.apply(ev.SendReleased(task, instruction.peer))
        elif isinstance(instruction, ev.ReduceChunk):
            core.apply(ev.ChunkReduced(instruction.virtual_stage))
