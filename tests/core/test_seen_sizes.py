"""What a limit on bytes expects, from sizes that were seen; and how far it can be passed when they turn out larger."""

from __future__ import annotations

from dataclasses import dataclass

from batches import examples
from core_script import Script, T
from hypothesis import given
from hypothesis import strategies as st

from rrfp import View
from rrfp.core import events as ev
from rrfp.core.events import ChunkReduced
from rrfp.core.group_step import GroupMembership
from rrfp.hints.priorities import BackwardForward
from rrfp.memory.admission import Limit
from rrfp.memory.seen_sizes import REMEMBERED_STEPS, SeenSizes
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import TablePlacement
from rrfp.model.tasks import Kind, Mode, StepId

ONE, SPLIT = TaskGraph.chain(1), TaskGraph.chain(1, split=True)


class Patient(BackwardForward):
    """May wait, so that no backward is held back for weight tasks."""

    def open_step(self, view: View) -> None:
        super().open_step(view)
        self.may_wait = True


def forward(script: Script, task: str, held: int, output: int = 0) -> None:
    script.told(ev.Enqueued(T(task)), ev.Completed(T(task), held=held, output=output))


def step(script: Script, number: int, sizes: list[int], mode: Mode = Mode.TRAIN) -> None:
    """A whole step of one unsplit stage, one microbatch after the other."""
    script.opened(StepId(number, mode, len(sizes)))
    for m, size in enumerate(sizes):
        script.ran(f"F{m}@0", held=size)
        if mode is Mode.TRAIN:
            script.ran(f"B{m}@0")
    if mode is Mode.TRAIN:
        script.told(ChunkReduced(0))


def test_an_output_on_its_way_is_part_of_what_a_forward_is_expected_to_leave() -> None:
    script = Script(TaskGraph.chain(2), microbatches=4, limit=Limit(bytes=100))
    forward(script, "F0@0", held=30, output=20)
    assert script.ready == "F1@0 F2@0 F3@0"  # 50 + 50
    forward(script, "F1@0", held=30, output=20)
    script.released(1, "F0@0", "F1@0")
    assert script.ready == ""  # 60 + 50


def test_with_a_hint_that_may_wait_what_every_backward_will_add_is_kept_free() -> None:
    script = Script(SPLIT, microbatches=5, limit=Limit(bytes=100), hint=Patient())
    script.ran("F0@0", held=10)
    script.ran("B0@0", held=25)
    script.ran("W0@0")
    script.ran("F1@0", "F2@0", held=10)
    assert script.ready == "F3@0 F4@0 B1@0 B2@0"  # 20 + 2 * 15 + 25
    script.ran("F3@0", held=10)
    assert script.ready == "F4@0 B1@0 B2@0 B3@0"  # 30 + 3 * 15 + 25 = 100
    script.ran("F4@0", held=10)
    script.ran("B1@0", "B2@0", "B3@0", "B4@0", held=25)
    assert script.core.peaks.num_bytes == 100


def test_a_last_task_adds_nothing_to_what_it_frees() -> None:
    """Whatever its program says that is held afterwards, beside the gradient on its way out."""
    script = Script(TaskGraph.chain(2), stage=1, microbatches=3, limit=Limit(bytes=100))
    script.arrived("F0@0", "F1@0", "F2@0")
    forward(script, "F0@1", held=40)
    script.told(ev.Enqueued(T("B0@1")), ev.Completed(T("B0@1"), held=40, output=30))
    script.released(0, "B0@1")
    forward(script, "F1@1", held=40)
    assert "F2@1" in script.ready, "40 + 40"


def test_growth_is_expected_in_bytes_or_in_proportion_whichever_is_less() -> None:
    script = Script(SPLIT, microbatches=5, limit=Limit(bytes=250), hint=Patient())
    script.ran("F0@0", held=100)
    script.ran("B0@0", held=200)
    script.ran("W0@0")
    script.ran("F1@0", held=10)
    assert script.ready == "F2@0 F3@0 F4@0 B1@0"  # 10 + 10 + 200: in bytes it would be 100 more
    script.ran("F2@0", held=2)
    script.ran("B2@0", held=102)  # a share of 50: in proportion that would be 500 more for F1@0
    script.ran("W2@0")
    assert script.ready == "B1@0"  # 10 + 100 + 200


def test_a_large_step_is_forgotten_in_time() -> None:
    script = Script(ONE, microbatches=0, limit=Limit(bytes=100))
    step(script, 0, [80])
    for number in range(1, REMEMBERED_STEPS + 1):
        step(script, number, [20])
    script.opened(StepId(REMEMBERED_STEPS + 1, Mode.TRAIN, 5))
    script.ran("F0@0", "F1@0", "F2@0", "F3@0", held=20)
    assert "F4@0" in script.ready  # 80 + 20
    assert script.core.peaks.num_bytes == 80


def test_a_large_step_is_remembered_until_then() -> None:
    script = Script(ONE, microbatches=0, limit=Limit(bytes=100))
    step(script, 0, [80])
    for number in range(1, REMEMBERED_STEPS):
        step(script, number, [20])
    script.opened(StepId(REMEMBERED_STEPS, Mode.TRAIN, 5))
    script.ran("F0@0", held=20)
    assert "F1@0" in script.ready  # 20 + 80
    script.ran("F1@0", held=20)
    assert "F2@0" not in script.ready  # 40 + 80


def test_training_says_nothing_of_a_forward_only_step() -> None:
    script = Script(TaskGraph.chain(2), microbatches=0, limit=Limit(bytes=100))
    script.opened(StepId(0, Mode.TRAIN, 1))
    forward(script, "F0@0", held=90)
    script.arrived("B0@1")
    script.ran("B0@0")
    script.released(1, "F0@0")
    script.told(ChunkReduced(0))
    script.opened(StepId(1, Mode.FORWARD, 3))
    forward(script, "F0@0", held=0, output=20)
    assert script.ready == "F1@0 F2@0"


def test_steps_are_forgotten_one_by_one() -> None:
    seen = SeenSizes(1)
    for size in range(REMEMBERED_STEPS + 3, 0, -1):
        seen.open_step()
        seen.saw(0, size)
    assert seen.expected[0].held == REMEMBERED_STEPS + 1
    seen.saw_growth(0, before=10, after=5)
    assert (seen.expected[0].growth, seen.expected[0].growth_share) == (0, 0.0)
    seen.saw_growth(0, before=10, after=15)
    assert (seen.expected[0].growth, seen.expected[0].growth_share) == (5, 0.5)


# Each microbatch is expected to hold its own bytes.


def test_what_a_later_task_leaves_says_nothing_of_a_number() -> None:
    """Backwards free what forwards held, in proportion to nothing."""
    script = Script(ONE, microbatches=0, limit=Limit(bytes=100))
    script.told(ev.StepOpened(0, Mode.TRAIN, 4, (9.0, 9.0, 9.0, 9.0)))
    for m, size in enumerate((60, 20, 60, 30)):
        script.told(ev.Previewed(T(f"F{m}@0"), size))
    script.ran("F0@0", held=60)
    script.ran("B0@0")
    script.ran("F1@0", held=20)
    script.ran("B1@0")
    script.ran("F2@0", held=60)
    assert "F3@0" in script.ready, "60 + 30"


def test_a_forward_starts_where_its_own_bytes_fit() -> None:
    script = Script(ONE, microbatches=0, limit=Limit(bytes=100))
    script.told(ev.StepOpened(0, Mode.TRAIN, 4, (6.0, 1.0, 7.0, 5.0)))
    script.ran("F0@0", held=60)
    assert script.ready == "F1@0 B0@0"
    script.ran("F1@0", held=10)
    assert script.ready == "B0@0 B1@0"
    script.ran("B0@0")
    assert script.ready == "F2@0 F3@0 B1@0"


def test_an_unknown_forward_in_flight_counts_as_the_largest() -> None:
    """Else two at once could turn out larger than expected."""
    script = Script(ONE, microbatches=0, limit=Limit(bytes=100))
    script.told(ev.StepOpened(0, Mode.TRAIN, 4, (5.0, 1.0, 1.0, 1.0)))
    script.ran("F0@0", held=45)
    script.enqueued("F1@0")
    assert script.ready == "F2@0 F3@0 B0@0 B1@0"  # 45 + 45 + 9
    script.enqueued("F2@0")
    assert script.ready == "B0@0 B1@0 B2@0"


@dataclass(frozen=True)
class Case:
    """Sizes of microbatches after F, by step; what B makes of each, in percent; the limit; and who runs first."""

    steps: list[list[int]]
    percent: int
    limit: int
    choices: list[int]
    knows: str

    def opened(self, script: Script, number: int, sizes: list[int]) -> None:
        """Open a step, and show what is known of its microbatches."""
        known = {"nothing": None, "all": sizes, "zeros": [0] * len(sizes), "nonsense": sizes[::-1]}[self.knows]
        script.step = StepId(number, Mode.TRAIN, len(sizes))
        script.told(ev.StepOpened(number, Mode.TRAIN, len(sizes), None if known is None else tuple(known)))
        for m, size in enumerate(known or ()):
            script.told(ev.Previewed(T(f"F{m}@0"), size))


cases = st.builds(
    Case,
    steps=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=8), min_size=1, max_size=4),
    percent=st.integers(50, 250),
    limit=st.integers(1, 200),
    choices=st.lists(st.integers(0, 99), min_size=1, max_size=12),
    knows=st.sampled_from(["nothing", "all", "zeros", "nonsense"]),
)


@examples(200)
@given(cases)
def test_the_limit_is_passed_by_one_surprise_at_most(case: Case) -> None:
    """Whatever the sizes, the estimates and the order: by less than one microbatch, or as much as one needs alone."""
    script = Script(SPLIT, microbatches=0, limit=Limit(bytes=case.limit))
    turn = 0
    for number, sizes in enumerate(case.steps):
        case.opened(script, number, sizes)
        grown = [size * case.percent // 100 for size in sizes]
        left = 3 * len(sizes)
        while left:
            ready = list(script.core.ready)
            assert ready, "nothing is ever stuck"
            task = ready[case.choices[turn % len(case.choices)] % len(ready)]
            turn, left = turn + 1, left - 1
            m = task.microbatch
            held = {Kind.F: sizes[m], Kind.B: grown[m], Kind.W: 0}[task.kind]
            before = script.core.view.held_bytes
            script.told(ev.Enqueued(task), ev.Completed(task, held=held))
            assert task.kind is not Kind.F or not before or before < case.limit
            # What a B adds is seen with the first one only: it may surprise for all microbatches before theirs.
            if case.percent <= 100:
                assert script.core.view.held_bytes < case.limit + max(sizes)
        script.told(ChunkReduced(0))


@examples(200)
@given(cases)
def test_where_sizes_are_known_the_limit_is_kept(case: Case) -> None:
    """From the second forward on, by numbers that decide them; and in a step like the one before it in any case.

    In any order: forwards first as well as weight gradients last.
    """
    script = Script(SPLIT, microbatches=0, limit=Limit(bytes=case.limit))
    sizes = case.steps[0]
    grown = [size * case.percent // 100 for size in sizes]
    for number in range(2):
        case.opened(script, number, sizes)
        for turn in range(3 * len(sizes)):
            ready = list(script.core.ready)
            task = ready[case.choices[turn % len(case.choices)] % len(ready)]
            held = {Kind.F: sizes[task.microbatch], Kind.B: grown[task.microbatch], Kind.W: 0}[task.kind]
            script.told(ev.Enqueued(task), ev.Completed(task, held=held))
        if number or (case.knows == "all" and case.percent <= 100):
            assert script.core.peaks.num_bytes <= max(case.limit, max(sizes), max(grown))
        script.told(ChunkReduced(0))


# What inputs show, and when.


def previews(instructions: list[ev.Instruction]) -> str:
    """The forwards that these ask about."""
    return " ".join(str(each.task) for each in instructions if isinstance(each, ev.Preview))


def test_a_forward_is_asked_about_as_soon_as_its_last_input_is_here() -> None:
    # F of 2 reads 0, which runs elsewhere, and 1, which the caller feeds.
    graph = TaskGraph(TablePlacement((0, 1, 1)), ((0, 2), (1, 2)))
    script = Script(graph, 1, limit=Limit(bytes=100))
    assert previews(script.begun) == "F0@1 F1@1"
    assert previews(script.arrived("F0@0")) == ""
    assert previews(script.enqueued("F0@1")) == ""
    assert previews(script.completed("F0@1")) == "F0@2"
    assert previews(script.ran("F1@1")) == ""
    assert previews(script.arrived("F1@0")) == "F1@2"
    assert previews(script.ran("F0@2", "B0@2", "B0@1", "F1@2", "B1@2", "B1@1")) == ""


def test_inputs_that_came_before_the_step_are_asked_about_when_it_opens() -> None:
    script = Script(TaskGraph.chain(2), 1, microbatches=0, limit=Limit(bytes=100))
    script.arrived("F1@0", step=StepId(0, Mode.TRAIN, 2))
    assert previews(script.opened(StepId(0, Mode.TRAIN, 2))) == "F1@1"


def test_a_forward_whose_inputs_are_skipped_is_asked_about_at_once_and_a_skipped_one_never() -> None:
    script = Script(TaskGraph.chain(3), 1, microbatches=3, limit=Limit(bytes=100), skipped=[{0}, {1}, ()])
    assert previews(script.begun) == "F0@1"
    assert previews(script.arrived("F2@0")) == "F2@1"


def test_without_a_limit_on_bytes_and_on_a_follower_nothing_is_asked() -> None:
    graph, limit = TaskGraph.chain(1, chunks=2), Limit(bytes=100)
    for script in (Script(graph), Script(graph, limit=limit, group=GroupMembership(1, 2))):
        script.told(*(ev.Ordered(script.step, 0, T("F0@0")) for _ in range(script.core.group.member)))
        assert previews([*script.begun, *script.ran("F0@0")]) == ""


# A lane that runs ahead.


def test_a_forward_that_is_enqueued_before_its_input_is_computed_is_like_no_other() -> None:
    script = Script(TaskGraph.chain(1, chunks=2), microbatches=4, limit=Limit(bytes=1000))
    for task in ("F0@0", "F0@1", "F1@0", "F2@0"):
        script.told(ev.Previewed(T(task), signature="usual"))
    script.ran("F0@0", "F0@1", held=10)
    script.enqueued("F1@0")
    assert script.ready == "F1@1 F2@0 F3@0 B0@1", "F1@0 is as F0@0 was"
    script.enqueued("F1@1")
    assert script.ready == "B0@1 B1@1"
    assert previews(script.completed("F1@0", held=10)) == ""
    script.completed("F1@1", held=10)
    assert script.ready == "F2@0 F3@0 B0@1 B1@1"


def enqueued(script: Script, task: str, signature: str) -> None:
    script.told(ev.Previewed(T(task), signature=signature), ev.Enqueued(T(task)))


def test_no_forward_starts_behind_one_whose_signature_is_new() -> None:
    script = Script(TaskGraph.chain(1, chunks=2), microbatches=4, limit=Limit(bytes=1000))
    enqueued(script, "F0@0", "short")
    assert script.ready == "", "neither here nor on the deeper chunk, whatever else would fit"
    script.completed("F0@0", held=10)
    enqueued(script, "F1@0", "short")
    assert script.ready == "F0@1 F1@1 F2@0 F3@0", "the size of this one is known"
    enqueued(script, "F0@1", "short")
    assert script.ready == "B0@1", "on another chunk the same signature is new"
    script.completed("F1@0", "F0@1", held=10)
    enqueued(script, "F2@0", "long")
    assert script.ready == "B0@1"
    script.completed("F2@0", held=500)
    assert script.ready == "F1@1 F2@1 B0@1", "500 more would not fit"


def test_even_a_forward_that_must_go_on_waits_for_a_size() -> None:
    script = Script(TaskGraph.chain(2), stage=1, microbatches=2, limit=Limit(bytes=10), in_order=((Kind.B, 1),))
    script.arrived("F1@0")
    enqueued(script, "F1@1", "short")
    script.arrived("F0@0")
    assert script.ready == ""
    script.completed("F1@1", held=10)
    assert script.ready == "F0@1"


def test_a_signature_is_remembered_as_long_as_its_size_and_anew_with_each_use() -> None:
    script = Script(ONE, microbatches=0, limit=Limit(bytes=1000))

    def is_known(number: int, signature: str) -> bool:
        script.opened(StepId(number, Mode.TRAIN, 2))
        enqueued(script, "F0@0", signature)
        known = "F1@0" in script.ready
        script.completed("F0@0", held=1)
        enqueued(script, "F1@0", "usual")
        script.completed("F1@0", held=1)
        script.ran("B0@0", "B1@0")
        script.told(ChunkReduced(0))
        return known

    answers = [is_known(number, "rare" if number in (0, 8, 17) else "usual") for number in range(18)]
    assert REMEMBERED_STEPS == 8
    assert answers[8], "seen 8 steps ago"
    assert not answers[17], "seen 9 steps ago"
    assert answers[9:17] == [True] * 8
    assert answers[0] is answers[17] is False
