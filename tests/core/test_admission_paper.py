"""The paper's admission rule (Appendix C, several chunks): free below K*C, one microbatch at a time from there on."""

from __future__ import annotations

import pytest
from core_script import Script, T

from rrfp.core import events as ev
from rrfp.core.ready_set import DrainOrder, ForcedOrder
from rrfp.core.usage import WaitCause
from rrfp.errors import ConfigError
from rrfp.hints.priorities import BackwardPriority, ForwardPriority
from rrfp.memory.admission import Limit
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import Placement
from rrfp.model.tasks import Kind, Mode
from rrfp.model.visits import Visits


def script_of(
    graph: TaskGraph, stage: int = 0, *, microbatches: int = 3, limit: int = 1, in_order: tuple[ForcedOrder, ...] = ()
) -> Script:
    return Script(graph, stage, microbatches, limit=Limit(limit, rule="paper"), in_order=in_order)


ALONE = TaskGraph.chain(1, chunks=2)


def test_below_the_limit_any_task_may_start() -> None:
    script = script_of(ALONE, limit=2)
    script.ran("F1@0", "F2@0")
    assert script.ready == "F1@1 F2@1 F0@0"
    script.ran("F1@1")
    assert script.ready == "F2@1 F0@0 B1@1"  # D = 3 of 4


def test_at_the_limit_only_the_lowest_unfinished_microbatch_runs_in_its_order() -> None:
    script = script_of(ALONE)
    script.ran("F1@0", "F2@0")
    drained = []
    while script.core.view.held >= 2:
        drained.append(script.ready)
        script.ran(script.ready)
    assert drained == ["F0@0", "F0@1", "B0@1", "B0@0", "F1@1", "B1@1", "B1@0"]
    assert script.ready == "F2@1"  # D = 1: anything again


def test_d_passes_the_limit_by_the_number_of_chunks() -> None:
    script = script_of(ALONE)
    script.ran("F1@0", "F2@0", "F0@0", "F0@1")
    assert (script.core.view.held, script.core.peaks.held, script.core.view.slots) == (4, 4, 2)


def test_a_full_stage_waits_for_what_it_drains_next_although_something_else_is_ready() -> None:
    script = script_of(TaskGraph.chain(2, chunks=2))
    script.ran("F0@0", "F1@0")
    script.arrived("F1@1")
    assert (script.ready, bool(script.core.ready)) == ("", False)  # F1@2 and F2@0 are blocked: F0@2 is next
    assert script.core.wait_cause() is WaitCause.MEMORY
    script.arrived("F0@1")
    assert script.ready == "F0@2"


def test_backwards_of_later_microbatches_are_kept_out_too() -> None:
    script = script_of(TaskGraph.chain(2, chunks=2), stage=1, limit=2)
    script.arrived("F1@0", "F2@0", "F1@2", "F2@2")
    script.ran("F1@1", "F1@3", "F2@1", "F2@3")
    assert script.ready == ""
    assert [*script.core.ready.gated()] == [T("B1@3"), T("B2@3")]
    script.arrived("F0@0")
    assert script.ready == "F0@1"


def test_a_hint_is_asked_for_what_is_drained_and_cannot_choose_otherwise() -> None:
    for hint in (BackwardPriority(), ForwardPriority()):
        script = Script(ALONE, microbatches=3, hint=hint, limit=Limit(1, rule="paper"))
        script.ran("F1@0", "F2@0")
        assert script.decisions(4) == "F0@0 F0@1 B0@1 B0@0"


def test_weight_tasks_follow_their_backward_when_drained() -> None:
    script = script_of(TaskGraph.chain(1, chunks=2, split=True))
    script.ran("F1@0", "F2@0")
    drained = []
    while script.core.view.held >= 2:
        drained.append(script.ready)
        script.ran(script.ready)
    assert drained == ["F0@0", "F0@1", "B0@1", "W0@1", "B0@0", "W0@0", "F1@1", "B1@1", "W1@1", "B1@0", "W1@0"]


def test_what_has_run_before_is_not_drained_again() -> None:
    script = script_of(TaskGraph.chain(1, chunks=2, split=True), limit=2)
    script.ran("F0@0", "F0@1", "B0@1", "B0@0", "F1@0", "F2@0")
    assert script.core.view.held == 4
    assert script.ready == "W0@1"
    script.ran("W0@1")
    assert script.core.view.held == 3
    assert script.ready == "F1@1 F2@1 W0@0"


def test_with_some_stages_split_only_those_serve_weight_tasks() -> None:
    graph = TaskGraph(Placement(1, 2), split=(True, False))
    script = script_of(graph)
    script.ran("F1@0", "F2@0", "F0@0", "F0@1")
    assert script.ready == "B0@1"
    script.ran("B0@1")
    assert script.ready == "B0@0"
    script.ran("B0@0")
    assert script.ready == "W0@0"


def test_the_next_microbatch_is_drained_while_the_last_task_of_the_one_before_still_runs() -> None:
    """Depth 2: B0@0 is on the lane; what is enqueued behind it counts it as done."""
    script = script_of(ALONE)
    script.ran("F1@0", "F2@0", "F0@0", "F0@1", "B0@1")
    script.enqueued("B0@0")
    assert (script.core.view.held, script.ready) == (2, "F1@1")
    script.completed("B0@0")
    assert (script.core.view.held, script.ready) == (2, "F1@1")


def test_a_forced_order_needs_no_reserve() -> None:
    forced = ((Kind.B, 0), (Kind.B, 1))
    script = script_of(ALONE, in_order=forced)
    script.ran("F1@0")
    assert script.ready == "F1@1 F0@0 F2@0"  # the staircase's reserve would keep F1@0 out already
    script.ran("F1@1")
    assert script.ready == "F0@0"
    script.ran("F0@0", "F0@1", "B0@1", "B0@0")
    assert script.ready == "B1@1"


def test_with_one_chunk_it_is_the_staircase_with_its_reserve() -> None:
    forced = ((Kind.B, 0),)
    script = script_of(TaskGraph.chain(1), limit=2, in_order=forced)
    script.ran("F1@0")
    assert script.ready == "F0@0"
    script.ran("F0@0")
    assert script.ready == "B0@0"


def test_forward_only_it_is_the_staircase() -> None:
    script = Script(ALONE, microbatches=2, mode=Mode.FORWARD, limit=Limit(1, rule="paper"))
    script.ran("F1@0")
    assert script.ready == "F1@1"  # the paper's rule would admit F0@0 at D = 1
    assert script.core.view.slots == 2


def test_without_a_limit_nothing_is_drained() -> None:
    script = Script(ALONE, microbatches=3, limit=Limit(rule="paper"))
    script.ran("F2@0", "F1@0", "F0@0", "F2@1")
    assert script.ready == "F0@1 F1@1 B2@1"


def test_heads_and_the_first_of_a_kind_are_what_is_drained() -> None:
    script = script_of(ALONE)
    script.ran("F1@0", "F2@0", "F0@0")
    ready = script.core.ready
    assert [*ready.heads()] == [T("F0@1")]
    assert (ready.first(Kind.F), ready.first(Kind.B), ready.head(Kind.F, 0)) == (T("F0@1"), None, None)
    assert (len(ready), T("F1@1") in ready) == (1, False)


def test_a_limit_in_bytes_and_an_unknown_rule_are_refused() -> None:
    with pytest.raises(ConfigError, match="limit: bytes must be None with rule 'paper'"):
        Limit(2, 100, "paper")
    with pytest.raises(ConfigError, match="rule is 'strict', must be one of: staircase, paper"):
        Limit(2, rule="strict")


def test_a_service_order_follows_the_lowest_microbatch_that_is_not_done() -> None:
    order = DrainOrder((0, 3), [(Kind.F, Kind.B), (Kind.F, Kind.B, Kind.W)], Visits(2))
    seen = []
    while (due := order.due()) is not None:
        seen.append(str(due))
        order.note(due)
    assert seen == [f"{kind}{m}@{v}" for m in (0, 1) for kind, v in zip("FFBWB", (0, 3, 3, 3, 0), strict=True)]


def test_a_service_order_skips_what_ran_out_of_turn() -> None:
    order = DrainOrder((0, 3), [(Kind.F, Kind.B)] * 2, Visits(2))
    for task in ("F0@0", "B0@3", "F1@0"):
        order.note(T(task))
    assert order.due() == T("F0@3")
    order.note(T("F0@3"))
    assert order.due() == T("B0@0")
    order.note(T("B0@0"))
    assert order.due() == T("F1@3")


def test_replicas_share_forwards_under_it_where_a_stage_has_one_chunk() -> None:
    opened = ev.StepOpened(0, Mode.TRAIN, 2, pool=ev.Pool(0, 2, (0, 1)))
    one = Script(TaskGraph.chain(2), microbatches=0, limit=Limit(2, rule="paper"))
    one.told(opened)
    assert one.core.step is not None
    several = Script(TaskGraph.chain(2, chunks=2), microbatches=0, limit=Limit(2, rule="paper"))
    with pytest.raises(ConfigError, match=r"^pool is given, .* the paper's rule for several chunks$"):
        several.told(opened)
