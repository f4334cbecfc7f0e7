"""Slot-aware, rule by rule, on one core; then that it ends on any pipeline."""

from __future__ import annotations

import pytest
from core_script import Script
from hypothesis import given
from hypothesis import strategies as st

from rrfp.core.events import BegunReported, Claimed, Completed, Enqueued, Idle, Pool, Run, StepOpened
from rrfp.core.ready_set import ChunkOrder, ReadySet
from rrfp.core.stage_core import StageCore
from rrfp.costs import make_costs
from rrfp.engine.engine import run
from rrfp.hints.slot_aware import SlotAware
from rrfp.lab.cluster.random_run import RandomRun
from rrfp.lab.simulation import simulate
from rrfp.memory.admission import Limit
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import Layout, Placement
from rrfp.model.tasks import Kind, Mode, StepId, Task


def stage(
    index: int, stages: int = 4, *, limit: Limit | int | None, microbatches: int = 8, split: bool = True
) -> Script:
    """A stage to which every forward of the step has come, and no backward."""
    script = Script(TaskGraph.chain(stages, split=split), index, microbatches, hint=SlotAware(), limit=limit)
    if index:
        script.arrived(*(f"F{m}@{index - 1}" for m in range(microbatches)))
    return script


# Rule 3: forwards first until N - s are on their way, then BFW.


def test_forwards_go_first_until_as_many_as_1f1b_warms_up_with_are_on_their_way() -> None:
    script = stage(1, limit=None)
    script.arrived("B0@2", "B1@2", "B2@2")
    assert script.decisions(5) == "F0@1 F1@1 F2@1 B0@1 F3@1"


def test_beyond_that_depth_it_alternates_as_bfw_does() -> None:
    """Five are on their way where the depth is 3: still, after a backward a forward has the first chance."""
    script = stage(1, limit=None)
    assert script.decisions(5) == "F0@1 F1@1 F2@1 F3@1 F4@1"
    script.arrived("B0@2", "B1@2")
    assert script.decisions(4) == "B0@1 F5@1 B1@1 F6@1"


def test_below_that_depth_a_forward_goes_before_a_second_backward() -> None:
    script = stage(1, limit=None, microbatches=4)
    script.ran("F0@1", "F1@1")
    script.arrived("B0@2", "B1@2")
    script.ran("B0@1", "W0@1")  # last came a weight task: BFW would take B1 now
    assert script.decisions(3) == "F2@1 F3@1 B1@1"


def test_the_depth_is_in_chunk_tasks_where_a_stage_has_chunks() -> None:
    """One stage of two chunks: two chunk tasks may be on their way, and one is. Last came a weight task."""
    script = Script(TaskGraph.chain(1, chunks=2, split=True), microbatches=3, hint=SlotAware())
    script.ran("F0@0", "F0@1", "B0@1", "W0@1")
    assert script.decisions(2) == "F1@0 B0@0"


# Rule 1: weight tasks that hold too many slots.


def test_on_a_full_first_stage_each_weight_task_runs_at_once() -> None:
    """Stage 0 at 1F1B's memory puts off none: max(0, 2 - 2) = 0."""
    script = stage(0, 2, limit=2)
    script.ran("F0@0", "F1@0")
    script.arrived("B0@1", "B1@1")
    assert script.decisions(5) == "B0@0 W0@0 F2@0 B1@0 W1@0"


def test_once_other_replicas_run_all_other_forwards_no_slot_is_needed() -> None:
    """As above, of three microbatches: whether the last forward runs on another copy decides."""
    for is_taken, order in ((True, "B0@0 B1@0 W0@0 W1@0"), (False, "B0@0 W0@0 F2@0 B1@0")):
        script = Script(TaskGraph.chain(2, split=True), 0, microbatches=0, hint=SlotAware(), limit=2)
        script.step = StepId(0, Mode.TRAIN, 3)
        script.told(StepOpened(0, Mode.TRAIN, 3, pool=Pool(0, 2, (0, 0, 0))))
        script.ran("F0@0", "F1@0")
        script.told(*(Claimed(script.step, Task(Kind.F, m, 1), 0) for m in range(2)))
        if is_taken:
            script.told(Claimed(script.step, Task(Kind.F, 2, 0), 1))
        assert script.core.view.forwards_here == 3 - is_taken
        script.arrived("B0@1", "B1@1")
        assert script.decisions(4) == order


def test_a_full_stage_s_puts_off_s_weight_tasks() -> None:
    script = stage(1, 4, limit=3)
    script.ran("F0@1", "F1@1", "F2@1")
    script.arrived("B0@2", "B1@2", "B2@2")
    assert script.decisions(4) == "B0@1 B1@1 W0@1 F3@1"


def test_with_more_slots_than_the_depth_more_weight_tasks_wait() -> None:
    """Slots 5, depth 3: two may wait, the third makes one run."""
    script = stage(1, 4, limit=5)
    script.ran("F0@1", "F1@1", "F2@1", "F3@1", "F4@1")
    script.arrived("B0@2", "B1@2", "B2@2", "B3@2")
    assert script.decisions(4) == "B0@1 B1@1 B2@1 W0@1"


def test_weight_tasks_wait_while_a_slot_is_free() -> None:
    """Two weight tasks wait where one may, but with a slot left it is not memory that keeps forwards out."""
    script = stage(0, 3, limit=4, microbatches=3)
    script.ran("F0@0", "F1@0", "F2@0")
    script.arrived("B0@1", "B1@1", "B2@1")
    assert script.decisions(4) == "B0@0 B1@0 B2@0 W0@0"


def test_a_stage_is_full_when_the_staircase_keeps_its_last_slot_for_the_deeper_chunk() -> None:
    """Three of four slots are taken, and the forward that is there may not have the last one."""
    script = Script(TaskGraph.chain(2, chunks=2, split=True), 0, 4, hint=SlotAware(), limit=2)
    script.arrived("F0@1")
    script.ran("F0@0", "F1@0", "F0@2")
    script.arrived("B0@3", "B0@1")
    script.ran("B0@2")
    assert script.decisions(1) == "W0@2"


def test_the_weight_tasks_that_may_wait_are_chunk_tasks_too() -> None:
    """Stage 1 with two chunks puts two off."""
    script = Script(TaskGraph.chain(3, chunks=2, split=True), 1, 4, hint=SlotAware(), limit=2)
    script.arrived("F0@0", "F1@0", "F0@3", "F1@3")
    script.ran("F0@1", "F0@4", "F1@1", "F1@4")
    script.arrived("B0@5", "B1@5", "B0@2", "B1@2")
    script.ran("B0@4", "B1@4")
    assert script.decisions(2) == "B0@1 W0@4"


def test_under_a_limit_on_bytes_a_weight_task_runs_once_it_keeps_a_forward_out() -> None:
    script = stage(0, 2, limit=Limit(bytes=20))
    script.ran("F0@0", "F1@0", held=10)
    script.arrived("B0@1", "B1@1")
    script.ran("B0@0", held=10)
    assert script.decisions(2) == "W0@0 F2@0"


def test_under_a_limit_on_bytes_it_waits_while_a_forward_fits_and_while_few_wait() -> None:
    for index, limit in ((0, 30), (1, 20)):
        script = stage(index, 4, limit=Limit(bytes=limit), microbatches=4)
        script.ran(f"F0@{index}", f"F1@{index}", held=10)
        script.arrived(f"B0@{index + 1}", f"B1@{index + 1}")
        script.ran(f"B0@{index}", held=10)
        assert script.decisions(1) == (f"F2@{index}" if index == 0 else "B1@1")


# Rule 2: a slot for a starving stage.


def full_second_stage(consumed: int) -> Script:
    """Stage 1 of 4, its 3 slots taken, one weight task and one backward ready; stage 2 has started ``consumed``."""
    script = stage(1, 4, limit=3)
    script.ran("F0@1", "F1@1", "F2@1")
    script.arrived("B0@2", consumed=1)
    script.ran("B0@1")
    script.arrived("B1@2", consumed=consumed)
    return script


def test_a_weight_task_goes_first_when_the_next_stage_has_started_all_that_was_sent() -> None:
    assert full_second_stage(consumed=3).decisions(2) == "W0@1 F3@1"


@pytest.mark.parametrize(("consumed", "then"), [(3, "W0@1"), (2, "B1@1")])
def test_so_it_does_under_a_limit_on_bytes(consumed: int, then: str) -> None:
    script = stage(1, 4, limit=Limit(bytes=30))
    script.ran("F0@1", "F1@1", "F2@1", held=10)
    script.arrived("B0@2", consumed=1)
    script.ran("B0@1", held=10)
    script.arrived("B1@2", consumed=consumed)
    assert script.decisions(1) == then


def test_a_backward_goes_first_while_the_next_stage_still_has_work() -> None:
    assert full_second_stage(consumed=2).decisions(1) == "B1@1"


def test_the_last_stage_feeds_nobody() -> None:
    """Stage 1 of 2 with two slots puts off one weight task; nothing downstream could make it run earlier."""
    script = stage(1, 2, limit=2)
    assert script.decisions(6) == "F0@1 B0@1 F1@1 B1@1 W0@1 F2@1"


def test_with_several_chunks_what_was_consumed_says_nothing() -> None:
    """Of three forwards on stage 1 only two went to a next stage; two weight tasks may wait, and one does."""
    script = Script(TaskGraph.chain(2, chunks=2, split=True), 1, 4, hint=SlotAware(), limit=2)
    script.arrived("F0@0", "F1@0")
    script.ran("F0@1", "F1@1")
    script.arrived("F0@2")
    script.ran("F0@3", "B0@3")
    script.arrived("B0@2", consumed=3)
    assert script.decisions(1) == "B0@1"


@pytest.mark.parametrize(("consumed_by_second", "decision"), [(3, "B1@0"), (4, "W0@0")])
def test_every_receiver_of_a_forward_counts(consumed_by_second: int, decision: str) -> None:
    """Virtual stage 0 feeds 1 and 2: four forwards are consumed when eight were started."""
    graph = TaskGraph(Placement(3), ((0, 1), (0, 2), (1, 2)), (True,) * 3)
    script = Script(graph, 0, 8, hint=SlotAware(), limit=4)
    script.ran("F0@0", "F1@0", "F2@0", "F3@0")
    script.arrived("B0@1", "B1@1", consumed=4)
    script.arrived("B0@2", "B1@2", consumed=consumed_by_second)
    script.ran("B0@0")
    assert script.decisions(1) == decision


# Where the rules vanish.


@pytest.mark.parametrize("limit", [None, 100])
def test_without_a_binding_limit_weight_tasks_only_fill_gaps(limit: int | None) -> None:
    script = stage(0, 2, limit=limit, microbatches=4)
    script.ran("F0@0", "F1@0")
    script.arrived("B0@1", "B1@1", "B2@1", "B3@1", consumed=4)
    assert script.decisions(9) == "B0@0 F2@0 B1@0 F3@0 B2@0 B3@0 W0@0 W1@0 W2@0"


def test_once_every_forward_has_run_a_slot_is_worth_nothing() -> None:
    """Full with more weight tasks waiting than stage 0 lets wait, and nothing left that could take a slot."""
    script = stage(0, 2, limit=2, microbatches=2)
    script.arrived("B0@1", "B1@1", consumed=2)
    assert script.decisions(6) == "F0@0 F1@0 B0@0 B1@0 W0@0 W1@0"


@given(seed=st.integers(0, 2**16), stages=st.integers(1, 5), microbatches=st.integers(1, 12), split=st.booleans())
def test_a_limit_that_all_microbatches_fit_in_changes_nothing(
    seed: int, stages: int, microbatches: int, split: bool
) -> None:
    costs = make_costs("mllm", stages, microbatches, split=split, seed=seed, jitter="J3", latency="spike")
    spans = [
        run(costs, [SlotAware() for _ in range(stages)], [limit] * stages).spans
        for limit in (Limit(), Limit(microbatches), Limit(microbatches + 3))
    ]
    assert spans[0] == spans[1] == spans[2]


def test_on_unsplit_stages_it_is_bf_after_the_warm_up() -> None:
    script = stage(0, 2, limit=4, split=False, microbatches=4)
    script.arrived("B0@1", "B1@1", "B2@1", "B3@1")
    assert script.decisions(8) == "F0@0 F1@0 B0@0 F2@0 B1@0 F3@0 B2@0 B3@0"


def test_chunks_that_are_not_split_leave_no_weight_task_behind() -> None:
    """Chunk 0 is whole, chunk 1 split. One W waits, and two may; the three Bs of chunk 0 are not waiting Ws."""
    script = Script(TaskGraph(Placement(1, 2), split=(False, True)), microbatches=5, hint=SlotAware(), limit=2)
    for m in range(3):
        script.ran(f"F{m}@0", f"F{m}@1", f"B{m}@1", f"W{m}@1", f"B{m}@0")
    script.ran("F3@0", "F3@1", "F4@0", "F4@1", "B3@1")
    assert script.core.view.held == 4
    assert script.decisions(1) == "B4@1"


def test_forward_only_steps_run_forwards() -> None:
    script = Script(TaskGraph.chain(2, split=True), 0, 3, Mode.FORWARD, hint=SlotAware(), limit=2)
    assert script.decisions(3) == "F0@0 F1@0 -"
    script.released(1, "F0@0")
    script.consumed(1, "F0@0")
    assert script.decisions(1) == "F2@0"


@given(
    stages=st.integers(1, 4),
    chunks=st.integers(1, 3),
    layout=st.sampled_from(["looped", "v"]),
    split=st.booleans(),
    microbatches=st.integers(1, 6),
    limit=st.one_of(st.none(), st.integers(1, 6), st.just("1f1b")),
    depth=st.integers(1, 2),
    seed=st.integers(0, 2**16),
)
def test_it_ends_on_any_pipeline(
    stages: int,
    chunks: int,
    layout: Layout,
    split: bool,
    microbatches: int,
    limit: int | str | None,
    depth: int,
    seed: int,
) -> None:
    graph = TaskGraph.chain(stages, chunks=chunks, layout=layout, split=split)
    limits = [Limit.resolve(limit, stage, stages) for stage in range(stages)]
    network = RandomRun(graph, [SlotAware() for _ in range(stages)], limits, seed=seed, depth=depth)
    network.run([(Mode.TRAIN, microbatches), (Mode.FORWARD, microbatches)])


class Heads:
    """The part of a ready set whose price does not grow with what is ready."""

    def __init__(self, ready: ReadySet) -> None:
        self._ready = ready

    def first(self, kind: Kind, chunk_order: ChunkOrder = "deeper") -> Task | None:
        return self._ready.first(kind, chunk_order)


def test_a_decision_needs_heads_and_counters_only() -> None:
    script = Script(TaskGraph.chain(1, split=True), 0, 1000, hint=SlotAware())
    script.ran(*(f"F{m}@0" for m in range(500)), *(f"B{m}@0" for m in range(400)))
    heads = Heads(script.core.ready)
    assert SlotAware().choose(heads, script.core.view) == Task(Kind.F, 500, 0)  # type: ignore[arg-type]


# Rule 4: a wait for a forward, in 1F1B's memory.


def waiting(*, limit: int | None = 3, split: bool = False, idles: bool = True, microbatches: int = 6) -> Script:
    """Stage 1 of four after two forwards and a backward; another backward is ready, and a forward reported."""
    script = Script(TaskGraph.chain(4, split=split), 1, microbatches, hint=SlotAware(idles=idles), limit=limit)
    script.arrived("F0@0", "F1@0", "B0@2", "B1@2")
    for task in ("F0@1", "F1@1"):
        script.told(Enqueued(Task.parse(task)), Completed(Task.parse(task), seconds=1.0))
    for task in ("B0@1", "W0@1") if split else ("B0@1",):
        script.told(Enqueued(Task.parse(task)), Completed(Task.parse(task), seconds=2.0))
    script.told(BegunReported(script.step, Task.parse("F2@0"), 1.0))
    return script


@pytest.mark.parametrize("split", [False, True])
def test_it_waits_for_a_forward_that_is_due_rather_than_begin_a_second_backward(split: bool) -> None:
    script = waiting(split=split)
    assert script.core.decide() == Idle(Task.parse("B1@1"), Task.parse("F2@0"), 1.0, 4.0)
    assert script.core.step is not None
    assert script.core.step.pauses.reports_begun


def test_it_waits_only_in_1f1bs_memory_and_if_it_may() -> None:
    cases = [waiting(limit=limit, split=split) for limit in (4, 10, None) for split in (False, True)]
    cases += [waiting(split=split, idles=False) for split in (False, True)]
    assert [str(run.task) for case in cases if isinstance(run := case.core.decide(), Run)] == ["B1@1"] * len(cases)
    assert not any(case.core.step is None or case.core.step.pauses.reports_begun for case in cases)


@pytest.mark.parametrize(
    ("split", "sizes", "waits"),
    [(True, (2.0,) * 6, True), (True, (1.0, 2.0, 3.0, 1.0, 2.0, 3.0), False), (False, (1.0, 2.0) * 3, True)],
)
def test_on_split_stages_it_does_not_wait_where_sizes_differ(
    split: bool, sizes: tuple[float, ...], waits: bool
) -> None:
    core = StageCore(TaskGraph.chain(4, split=split), 1, SlotAware(), Limit(3))
    core.apply(StepOpened(0, Mode.TRAIN, 6, sizes))
    assert core.step is not None
    assert core.step.pauses.reports_begun is waits


def test_it_does_not_wait_where_all_microbatches_of_the_step_have_slots() -> None:
    script = waiting(microbatches=3)
    assert script.core.decide() == Run(Task.parse("B1@1"))


def test_a_forward_that_has_no_slot_or_does_not_exist_is_not_awaited() -> None:
    full = waiting()
    full.arrived("F2@0", "F3@0", "B2@2")
    full.ran("F2@1", "F3@1")  # all slots are taken again
    full.told(BegunReported(full.step, Task.parse("F4@0"), 1.0))
    assert full.core.decide() == Run(Task.parse("B1@1"))
    full.ran("B1@1")
    assert isinstance(full.core.decide(), Idle)


@pytest.mark.parametrize(("split", "jitter", "most"), [(False, "J1", 0.0), (False, "J2", 0.001), (True, "J2", 0.0)])
def test_the_wait_keeps_up_with_1f1b_where_tasks_are_alike(split: bool, jitter: str, most: float) -> None:
    """Five paired seeds of llm: without the wait it loses, with it next to nothing."""
    lost = {True: 0.0, False: 0.0}
    for seed in range(1000, 1005):
        costs = make_costs("llm", 8, 32, seed=seed, jitter=jitter, split=split)
        baseline = simulate(costs, strict="1f1b").makespan
        for idles in lost:
            own = simulate(costs, hint=SlotAware(idles=idles), limit="1f1b").makespan
            lost[idles] += own / baseline - 1
    assert lost[True] / 5 <= most + 1e-9
    assert lost[False] / 5 > 0.005
