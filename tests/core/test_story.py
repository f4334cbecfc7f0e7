"""What a core tells of one task: what happened to it, and what it waits for."""

from __future__ import annotations

import pytest
from core_script import Script, T

from rrfp.core import events as ev
from rrfp.core.event_history import EventHistory
from rrfp.core.group_step import GroupMembership
from rrfp.core.usage import WaitCause
from rrfp.core.waiting import Moment, Waiting, past_of, story, tell
from rrfp.errors import ConfigError
from rrfp.model.graph import TaskGraph
from rrfp.model.mesh import Mesh
from rrfp.model.tasks import Kind, Mode, StepId
from rrfp.model.topology import Topology

CHAIN = TaskGraph.chain(3)


def recorded(stage: int = 1, **options: object) -> Script:
    return Script(CHAIN, stage, history=EventHistory(), **options)  # type: ignore[arg-type]


def told(script: Script, task: str, rank: int | None = None, tp: int = 1) -> list[str]:
    mesh = Mesh((("pp", 3), ("tp", tp)))
    return tell(script.core, Topology.at(script.core.stage if rank is None else rank, mesh), T(task))


def test_a_task_is_told_from_its_input_to_the_end_of_its_send() -> None:
    script = recorded()
    assert told(script, "F1@1") == ["F1@0 owed by stage 0"]
    script.arrived("F0@0")
    script.enqueued("F0@1")
    script.arrived("F1@0")
    arrived = "F1@0 arrived after 1 task"
    assert told(script, "F1@1") == [arrived, "ready, but hint BackwardForward does not choose it"]
    script.enqueued("F1@1")
    assert told(script, "F1@1") == [arrived, "began after 1 task", "on the lane, after F0@1"]
    script.completed("F0@1")
    assert told(script, "F1@1")[-1] == "running"
    script.completed("F1@1", held=7)
    completed = "completed, holding 7 bytes, after 2 tasks"
    assert told(script, "F1@1") == [arrived, "began after 1 task", completed, "being sent to stage 2"]
    script.released(2, "F1@1")
    assert told(script, "F1@1")[3:] == ["sent to stage 2 after 2 tasks", "done"]


def test_the_events_and_the_wait_are_there_as_data() -> None:
    script = recorded()
    script.arrived("F0@0")
    script.ran("F0@1")
    events = story(script.core, T("B0@1"))
    assert events.moments == (Moment(ev.Enqueued(T("F0@1")), 0),)
    assert events.waiting == Waiting(T("B0@1"), (T("B0@2"),), cause=WaitCause.INPUT)
    assert past_of(script.core, Topology(1, 3), T("B0@1")) == "B0@1 so far: F0@1 began after 0 tasks"
    assert past_of(script.core, Topology(1, 3), T("F1@1")) == ""


def test_an_output_of_another_stage_has_a_story_too() -> None:
    script = recorded()
    assert told(script, "F0@0") == ["owed by stage 0"]
    script.told(ev.BegunReported(script.step, T("F0@0"), 0.5))
    script.arrived("F0@0")
    assert told(script, "F0@0") == ["reported as begun after 0 tasks", "arrived after 0 tasks", "here"]


def test_what_came_before_the_step_belongs_to_it_and_the_step_before_does_not() -> None:
    script = recorded(stage=2, microbatches=1, mode=Mode.FORWARD)
    script.arrived("F0@1")
    following = StepId(1, Mode.FORWARD, 1)
    script.arrived("F0@1", step=following)
    assert told(script, "F0@2")[:-1] == ["F0@1 arrived after 0 tasks"]
    script.ran("F0@2")
    script.opened(following)
    assert told(script, "F0@2") == [
        "F0@1 arrived before the step",
        "ready, but hint BackwardForward does not choose it",
    ]


def test_a_forced_order_makes_the_microbatch_before_an_input() -> None:
    script = recorded(in_order=((Kind.F, 1),))
    script.arrived("F0@0")
    script.ran("F0@1")
    assert told(script, "F1@1") == ["F0@1 began after 0 tasks", "F1@0 owed by stage 0"]


def test_a_leader_tells_who_reported_and_a_follower_what_was_ordered() -> None:
    leader, follower = GroupMembership(0, 2), GroupMembership(1, 2)
    script = recorded(group=leader)
    script.arrived("F0@0")
    report = ev.ReadyReported(script.step, 1, T("F0@1"))
    assert told(script, "F0@1", rank=2, tp=2)[-1] == "not reported by stage 1, tp 1 (rank 3)"
    script.told(report)
    assert told(script, "F0@1", rank=2, tp=2)[1] == "reported ready by stage 1, tp 1 (rank 3) after 0 tasks"
    script.ran("F0@1")
    script.told(ev.HeldReported(script.step, 1, T("F0@1"), 3))
    assert "reported complete by stage 1, tp 1 (rank 3) after 1 task" in told(script, "F0@1", rank=2, tp=2)
    script = recorded(group=follower)
    script.told(ev.Ordered(script.step, 0, T("F0@1")))
    assert told(script, "F0@1", rank=3, tp=2) == [
        "ordered as entry 0 after 0 tasks",
        "F0@0 owed by stage 0, tp 1 (rank 1)",
    ]
    assert told(script, "B0@1", rank=3, tp=2)[0] == "F0@1 ordered as entry 0 after 0 tasks"


def test_in_evaluation_a_forward_waits_for_its_credit() -> None:
    script = recorded(stage=0, mode=Mode.FORWARD)
    script.ran("F0@0")
    script.released(1, "F0@0")
    assert told(script, "F0@0")[-1] == "credit owed by stage 1"
    script.consumed(1, "F0@0")
    assert told(script, "F0@0")[-2:] == ["consumed by stage 1 after 1 task", "done"]


def test_a_core_that_keeps_no_events_still_says_what_a_task_waits_for() -> None:
    script = Script(CHAIN, stage=1)
    script.arrived("F0@0")
    assert story(script.core, T("F0@1")).moments is None
    assert told(script, "F0@1") == ["ready, but hint BackwardForward does not choose it"]
    assert told(script, "B0@1") == ["F0@1 owed by stage 1, B0@2 owed by stage 2"]


@pytest.mark.parametrize("task", ["F0@2", "F2@1", "W0@1"])
def test_a_task_that_the_stage_does_not_know_is_refused(task: str) -> None:
    with pytest.raises(ConfigError, match=f"task is {task}, which stage 1 neither runs nor reads in step 0"):
        told(recorded(), task)
    with pytest.raises(ConfigError, match="stage 1 has opened no step yet"):
        told(recorded(microbatches=0), task)
