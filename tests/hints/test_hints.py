"""The exact choices of every hint, decision by decision, on a stage whose inputs are all there."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest
from core_script import Script, T

from rrfp import Hint
from rrfp.core.events import ChunkReduced
from rrfp.errors import ConfigError
from rrfp.hints.priorities import (
    BackwardForward,
    BackwardForwardWeight,
    BackwardPriority,
    ForwardBackward,
    ForwardPriority,
)
from rrfp.hints.registry import ScheduleHint, Strict, create_hint, create_strict, hint_factory, hint_names
from rrfp.model.graph import TaskGraph
from rrfp.model.schedule import Schedule
from rrfp.model.tasks import Mode, StepId
from rrfp.schedules.registry import schedule_names

MIDDLE = TaskGraph.chain(3)


def supplied(hint: Hint, *, microbatches: int = 3, split: bool = False, limit: int | None = None) -> Script:
    """A middle stage to which every message of the step has come."""
    script = Script(TaskGraph.chain(3, split=split), 1, microbatches, hint=hint, limit=limit)
    script.arrived(*(f"F{m}@0" for m in range(microbatches)), *(f"B{m}@2" for m in range(microbatches)))
    return script


@pytest.mark.parametrize(
    ("hint", "decisions"),
    [
        (BackwardForward, "F0@1 B0@1 F1@1 B1@1 F2@1 B2@1 -"),
        (ForwardBackward, "F0@1 B0@1 F1@1 B1@1 F2@1 B2@1 -"),
        (BackwardPriority, "F0@1 B0@1 F1@1 B1@1 F2@1 B2@1 -"),
        (ForwardPriority, "F0@1 F1@1 F2@1 B0@1 B1@1 B2@1 -"),
        (BackwardForwardWeight, "F0@1 B0@1 F1@1 B1@1 F2@1 B2@1 -"),
    ],
)
def test_choices_on_unsplit_stages(hint: type[Hint], decisions: str) -> None:
    assert supplied(hint()).decisions(7) == decisions


@pytest.mark.parametrize(
    ("hint", "decisions"),
    [
        (BackwardForward, "F0@1 B0@1 F1@1 B1@1 W0@1 W1@1 -"),
        (ForwardBackward, "F0@1 B0@1 F1@1 B1@1 W0@1 W1@1 -"),
        (BackwardPriority, "F0@1 B0@1 F1@1 B1@1 W0@1 W1@1 -"),
        (ForwardPriority, "F0@1 F1@1 B0@1 B1@1 W0@1 W1@1 -"),
        (BackwardForwardWeight, "F0@1 B0@1 F1@1 B1@1 W0@1 W1@1 -"),
    ],
)
def test_a_weight_task_runs_when_nothing_else_is_ready(hint: type[Hint], decisions: str) -> None:
    assert supplied(hint(), microbatches=2, split=True).decisions(7) == decisions


def two_of_each(hint: Hint) -> Script:
    """Two backwards and two forwards are ready; what ran last was a forward."""
    script = Script(MIDDLE, 1, microbatches=4, hint=hint)
    script.arrived("F0@0", "F1@0", "B0@2", "B1@2")
    script.ran("F0@1", "F1@1")
    script.arrived("F2@0", "F3@0")
    return script


@pytest.mark.parametrize(
    ("hint", "decisions"),
    [
        (BackwardForward, "B0@1 F2@1 B1@1 F3@1"),
        (ForwardBackward, "B0@1 F2@1 B1@1 F3@1"),
        (BackwardPriority, "B0@1 B1@1 F2@1 F3@1"),
        (ForwardPriority, "F2@1 F3@1 B0@1 B1@1"),
    ],
)
def test_choices_after_a_forward_with_two_of_each_ready(hint: type[Hint], decisions: str) -> None:
    assert two_of_each(hint()).decisions(4) == decisions


@pytest.mark.parametrize(("hint", "decision"), [(BackwardForward, "B0@1"), (ForwardBackward, "F2@1")])
def test_bf_and_fb_open_a_round_with_different_kinds(hint: type[Hint], decision: str) -> None:
    """Beside a backward that is ready something was run: only a weight task leaves both hints at a round's start."""
    script = Script(TaskGraph.chain(3, split=True), 1, microbatches=3, hint=hint())
    script.arrived("F0@0", "F1@0", "B0@2", "B1@2")
    script.ran("F1@1", "F0@1", "B1@1", "W1@1")
    script.arrived("F2@0")
    assert script.decisions(1) == decision


@pytest.mark.parametrize("hint", [BackwardForward, ForwardBackward, BackwardForwardWeight])
def test_after_a_backward_forward_has_the_first_chance_and_waiting_changes_nothing(hint: type[Hint]) -> None:
    """The stage asks in vain after B0; then both kinds become ready: it is still forward's turn."""
    script = Script(MIDDLE, 1, microbatches=3, hint=hint())
    script.arrived("F0@0", "F1@0", "B0@2")
    script.ran("F0@1", "F1@1", "B0@1")
    assert script.decisions(2) == "- -"
    script.arrived("B1@2", "F2@0")
    assert script.decisions(2) == "F2@1 B1@1"


def test_a_chance_not_taken_passes_to_the_other_kind() -> None:
    """After B0 it is forward's turn, but no forward is ready: B1 runs, and forward has the first chance again."""
    script = Script(MIDDLE, 1, microbatches=3, hint=BackwardForward())
    script.arrived("F0@0", "F1@0", "B0@2", "B1@2")
    script.ran("F0@1", "F1@1", "B0@1")
    assert script.decisions(1) == "B1@1"
    script.arrived("F2@0", "B2@2")
    assert script.decisions(2) == "F2@1 B2@1"


def test_bf_runs_two_forwards_in_a_row_when_no_backward_is_ready() -> None:
    script = Script(MIDDLE, 1, microbatches=3, hint=BackwardForward())
    script.arrived("F0@0", "F1@0")
    assert script.decisions(3) == "F0@1 F1@1 -"


def test_bfw_starts_a_new_round_after_a_weight_task() -> None:
    """After W, backward has the first chance, although the last of B and F was a backward."""
    script = Script(TaskGraph.chain(3, split=True), 1, microbatches=3, hint=BackwardForwardWeight())
    script.arrived("F0@0", "F1@0", "B0@2")
    script.ran("F0@1", "F1@1", "B0@1")
    assert script.decisions(1) == "W0@1"
    script.arrived("B1@2", "F2@0")
    assert script.decisions(2) == "B1@1 F2@1"


def test_a_full_memory_turns_every_hint_to_backwards() -> None:
    for hint in (BackwardForward(), ForwardBackward(), BackwardPriority(), ForwardPriority()):
        assert supplied(hint, limit=1).decisions(6) == "F0@1 B0@1 F1@1 B1@1 F2@1 B2@1"


@pytest.mark.parametrize(
    ("hint", "decisions"),
    [
        (ForwardPriority("deeper"), "F0@0 F0@1 F1@0 F1@1 B0@1 B1@1 B0@0 B1@0"),
        (ForwardPriority("paper"), "F0@0 F1@0 F0@1 F1@1 B0@1 B1@1 B0@0 B1@0"),
        (BackwardForward("deeper"), "F0@0 F0@1 B0@1 F1@0 B0@0 F1@1 B1@1 B1@0"),
        (BackwardForward("paper"), "F0@0 F1@0 F0@1 B0@1 F1@1 B1@1 B0@0 B1@0"),
    ],
    ids=["f-priority, deeper", "f-priority, paper", "bf, deeper", "bf, paper"],
)
def test_the_chunk_order_of_forwards_is_the_hints(hint: Hint, decisions: str) -> None:
    assert Script(TaskGraph.chain(1, chunks=2), microbatches=2, hint=hint).decisions(8) == decisions


def test_deeper_chunks_and_lower_microbatches_come_first() -> None:
    script = Script(TaskGraph.chain(1, chunks=2, split=True), microbatches=2, hint=ForwardPriority())
    assert script.decisions(13) == "F0@0 F0@1 F1@0 F1@1 B0@1 B1@1 B0@0 B1@0 W0@1 W1@1 W0@0 W1@0 -"


ORDER = "F1@1 F0@1 B1@1 B0@1"


def schedule_of(text: str) -> Schedule:
    return Schedule("test", ((), tuple(map(T, text.split())), ()))


def test_a_schedule_as_hint_ranks_and_never_waits() -> None:
    script = Script(MIDDLE, 1, hint=ScheduleHint(lambda view: schedule_of(ORDER)))
    script.arrived("F0@0")
    assert script.decisions(2) == "F0@1 -"  # F1 comes first, but is not there
    script.arrived("F1@0", "B0@2", "B1@2")
    assert script.decisions(4) == "F1@1 B1@1 B0@1 -"


def test_a_schedule_may_rank_a_later_microbatch_first() -> None:
    script = Script(MIDDLE, 1, hint=ScheduleHint(lambda view: schedule_of(ORDER)))
    script.arrived("F0@0", "F1@0", "B0@2", "B1@2")
    assert script.decisions(5) == "F1@1 F0@1 B1@1 B0@1 -"


def test_strict_waits_for_the_next_task_of_its_schedule() -> None:
    script = Script(MIDDLE, 1, hint=Strict(lambda view: schedule_of(ORDER)))
    script.arrived("F0@0", "B0@2", "B1@2")
    assert script.decisions(2) == "- -"
    script.arrived("F1@0")
    assert script.decisions(5) == "F1@1 F0@1 B1@1 B0@1 -"


@pytest.mark.parametrize("kind", [ScheduleHint, Strict])
def test_a_schedule_runs_its_forwards_in_a_forward_only_step(kind: type[ScheduleHint]) -> None:
    script = Script(MIDDLE, 1, mode=Mode.FORWARD, hint=kind(lambda view: schedule_of(ORDER)))
    script.arrived("F0@0", "F1@0")
    assert script.decisions(3) == "F1@1 F0@1 -"


def test_a_schedule_is_looked_up_anew_for_every_step() -> None:
    script = Script(TaskGraph.chain(1), microbatches=1, hint=create_strict("gpipe"))
    assert script.decisions(2) == "F0@0 B0@0"
    script.told(ChunkReduced(0))
    script.opened(StepId(1, Mode.TRAIN, 2))
    assert script.decisions(4) == "F0@0 F1@0 B0@0 B1@0"


def test_an_unsplit_schedule_runs_each_weight_task_right_after_its_backward() -> None:
    script = Script(TaskGraph.chain(1, split=True), hint=create_strict("gpipe"))
    assert script.decisions(7) == "F0@0 F1@0 B0@0 W0@0 B1@0 W1@0 -"


BUILT_IN = (
    *("bf", "fb", "b-priority", "f-priority", "bfw"),
    *("slot-aware", "slot-aware-pyramid", "bfw-pyramid"),
)


def test_names_list_hints_and_schedules() -> None:
    assert hint_names() == (*BUILT_IN, *schedule_names())


def test_built_in_hints_need_no_installed_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rrfp.plugins.entry_points", lambda group: [])
    for name in hint_names():
        assert callable(hint_factory(name)().choose)


def test_a_plugin_does_not_hide_or_double_a_name_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint(name, "no_such_module:Hint", "rrfp.hints") for name in ("mine", "bf", "1f1b")]
    monkeypatch.setattr("rrfp.plugins.entry_points", lambda group: points)
    assert hint_names() == (*BUILT_IN, "mine", *schedule_names())
    assert isinstance(create_hint("1f1b"), ScheduleHint)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("bf", BackwardForward),
        ("fb", ForwardBackward),
        ("b-priority", BackwardPriority),
        ("f-priority", ForwardPriority),
        ("bfw", BackwardForwardWeight),
        ("gpipe", ScheduleHint),
    ],
)
def test_a_name_gives_a_fresh_hint(name: str, kind: type[Hint]) -> None:
    first, second = create_hint(name), create_hint(name)
    assert (type(first), type(second), first is second) == (kind, kind, False)


def test_a_hint_may_be_given_as_a_class_or_as_an_instance_to_copy() -> None:
    own = BackwardForward("paper")
    copied = create_hint(own)
    assert isinstance(copied, BackwardForward)
    assert (copied is own, copied.chunk_order) == (False, "paper")
    assert isinstance(create_hint(ForwardBackward), ForwardBackward)


def test_an_unknown_hint_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError) as caught:
        create_hint("fifo")
    names = ", ".join(hint_names())
    assert str(caught.value) == f"hint is 'fifo', must be one of: {names}, or a subclass of rrfp.Hint or its instance"


def test_an_unknown_strict_schedule_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError) as caught:
        create_strict("bf")
    assert str(caught.value) == "strict is 'bf', must be one of: gpipe, 1f1b, interleaved-1f1b, zb-h1, zb-v"


def test_something_that_is_no_hint_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        create_hint(lambda: 3)  # type: ignore[arg-type, return-value]
    assert str(caught.value) == "hint is of type int, must be a name, or a subclass of rrfp.Hint or its instance"


def test_a_class_that_asks_for_arguments_is_refused() -> None:
    class Wide(BackwardForward):
        def __init__(self, width: int) -> None: ...

    with pytest.raises(ConfigError, match=r"Wide must be a factory that is called with \(\): .*argument: 'width'"):
        create_hint(Wide)  # type: ignore[arg-type]


def test_an_object_that_is_no_hint_is_refused_before_it_is_copied() -> None:
    with pytest.raises(ConfigError, match=r"^hint is of type module, must be a name, or a subclass of rrfp\.Hint"):
        create_hint(pytest)  # type: ignore[arg-type]  # a module cannot be copied


def test_an_object_with_a_hints_methods_alone_is_refused() -> None:
    class Almost:
        def choose(self, ready: object, view: object) -> None: ...
        def open_step(self, view: object) -> None: ...
        def observe(self, event: object) -> None: ...

    with pytest.raises(ConfigError, match=r"hint is of type Almost \(.*test_hints.py\), must be a name, or a subclass"):
        create_hint(Almost())  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [ScheduleHint, Strict])
def test_a_schedule_that_misses_a_task_is_refused_when_the_step_opens(kind: type[ScheduleHint]) -> None:
    with pytest.raises(ConfigError) as caught:
        Script(MIDDLE, 1, hint=kind(lambda view: schedule_of("F1@1 B1@1")))
    assert str(caught.value) == "schedule test misses F0@1 on stage 1"
