"""Under a limit on bytes, a split backward that adds more than fits lets weight tasks go first."""

from __future__ import annotations

import pytest
from core_script import Script
from hypothesis import given
from hypothesis import strategies as st

from rrfp.core import events as ev
from rrfp.core.group_step import GroupMembership
from rrfp.hints.registry import create_strict
from rrfp.memory.admission import Limit
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Kind, Task

SPLIT = TaskGraph.chain(1, split=True)


def shown(microbatches: int, limit: int, **options: object) -> Script:
    """A stage that has seen microbatch 0 hold 10 bytes, and 15 after its backward."""
    script = Script(SPLIT, microbatches=microbatches, limit=Limit(bytes=limit), **options)  # type: ignore[arg-type]
    script.ran("F0@0", held=10)
    script.ran("B0@0", held=15)
    script.ran("W0@0")
    return script


def test_room_is_kept_for_the_largest_addition_alone() -> None:
    script = shown(6, 45)
    script.ran("F1@0", "F2@0", "F3@0", held=10)
    assert script.ready == "F4@0 F5@0 B1@0 B2@0 B3@0"  # 30 + 10 + 5
    script.ran("F4@0", held=10)
    assert script.ready == "B1@0 B2@0 B3@0 B4@0"  # 40 + 10 + 5


def test_a_backward_that_does_not_fit_waits_for_a_weight_task() -> None:
    script = shown(5, 50)
    script.ran("F1@0", "F2@0", "F3@0", "F4@0", held=10)
    script.ran("B1@0", "B2@0", held=15)
    assert script.core.peaks.num_bytes == 50
    assert script.ready == "W1@0 W2@0"
    script.enqueued("W1@0")
    assert script.ready == "B3@0 B4@0 W2@0", "what the lane runs before them is as good as free"
    script.enqueued("B3@0")
    assert script.ready == "B4@0 W2@0 W3@0", "50 - 15 + 5 + 5"
    script.enqueued("B4@0")
    script.completed("W1@0")
    script.completed("B3@0", "B4@0", held=15)
    assert script.core.peaks.num_bytes == 50
    assert script.ready == "W2@0 W3@0 W4@0"


@pytest.mark.parametrize(("output", "ready"), [(10, "F4@1 B2@1 B3@1"), (14, "B2@1 B3@1")])
def test_room_is_kept_for_all_that_backwards_send_beyond_what_they_free(output: int, ready: str) -> None:
    """A slow peer may leave all of it unsent, and no weight task frees it."""
    script = Script(TaskGraph.chain(2, split=True), stage=1, microbatches=5, limit=Limit(bytes=55))
    script.arrived(*(f"F{m}@0" for m in range(5)))
    script.ran("F0@1", held=10)
    backward = Task(Kind.B, 0, 1)
    script.told(ev.Enqueued(backward), ev.Completed(backward, held=25 - output, output=output))
    script.ran("W0@1")
    script.released(0, "B0@1")
    script.ran("F1@1", "F2@1", "F3@1", held=10)
    script.ran("B1@1", "W1@1")
    assert script.ready == ready  # 20 + 10 + 15; and 4 for each of three


def test_without_split_chunks_no_backward_is_deferred() -> None:
    script = Script(TaskGraph.chain(1), microbatches=3, limit=Limit(bytes=20))
    assert script.core.step is not None
    limit = script.core.step.admission.byte_limit
    assert limit is not None
    assert not limit.defers_backwards


def test_without_a_weight_task_to_run_a_backward_always_may() -> None:
    script = shown(3, 12)
    script.ran("F1@0", held=10)
    assert script.ready == "B1@0"
    script.enqueued("B1@0")
    script.completed("B1@0", held=15)
    assert script.ready == "W1@0"


def test_a_backward_that_adds_nothing_is_not_held_back() -> None:
    script = Script(SPLIT, microbatches=3, limit=Limit(bytes=30))
    script.ran("F0@0", "F1@0", held=10)
    script.ran("F2@0", held=25)
    script.ran("B0@0", held=10)
    assert script.ready == "B1@0 B2@0 W0@0"


@pytest.mark.parametrize(
    "options",
    [
        {"in_order": ((Kind.B, 0),)},
        {"hint": create_strict("zb-h1")},
        {"group": GroupMembership(size=2)},
    ],
    ids=["forced order", "a hint that may wait", "group"],
)
def test_backwards_are_never_held_back_where_weight_tasks_may_have_to_wait(options: dict[str, object]) -> None:
    script = Script(SPLIT, microbatches=3, limit=Limit(bytes=20), **options)  # type: ignore[arg-type]
    assert not script.core.step.admission.byte_limit.defers_backwards  # type: ignore[union-attr]


@given(
    sizes=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 10)), min_size=1, max_size=7),
    spare=st.integers(0, 40),
    choices=st.lists(st.integers(0, 20), min_size=21, max_size=21),
)
def test_where_sizes_are_known_no_order_passes_the_limit(
    sizes: list[tuple[int, int]], spare: int, choices: list[int]
) -> None:
    """Each microbatch fits alone, and forwards are shown beforehand. Whatever a hint takes, all tasks run."""
    growth = max(added for _, added in sizes)
    limit = max(held for held, _ in sizes) + growth + spare
    script = Script(SPLIT, microbatches=len(sizes) + 1, limit=Limit(bytes=limit))
    for m, (own, _) in enumerate([(1, 0), *sizes]):
        script.told(ev.Previewed(Task(Kind.F, m, 0), input_bytes=own))
    # The first one shows the largest addition there is, in bytes and in proportion.
    script.ran("F0@0", held=1)
    script.ran("B0@0", held=1 + growth)
    script.ran("W0@0")
    held: dict[int, int] = {}
    for choice in choices[: 3 * len(sizes)]:
        ready = sorted(script.core.ready)
        task = ready[choice % len(ready)]
        own, added = sizes[task.microbatch - 1]
        held[task.microbatch] = {Kind.F: own, Kind.B: own + added, Kind.W: 0}[task.kind]
        script.ran(str(task), held=held[task.microbatch])
        assert sum(held.values()) <= limit
    assert not list(script.core.ready), "all have run"
