"""How closely the times of a stage follow the sizes of microbatches."""

from __future__ import annotations

import random
from typing import Any

import pytest
from core_script import Script, T

from rrfp.core import events as ev
from rrfp.memory.admission import Limit
from rrfp.memory.size_order import by_stage, correlation, followed, least
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Mode, StepId


@pytest.mark.parametrize(
    ("sizes", "seconds", "expected"),
    [
        ([1, 2, 3], [10, 20, 30], 1.0),
        ([1, 2, 3], [5.5, 5, 4.5], -1.0),
        ([1, 2, 3, 4], [1, 3, 2, 4], 0.8),
        ([1, 2], [7, 7], 0.0),
        ([2, 2], [1, 9], None),
        ([4], [1], None),
        ([1e200, 2e200, 3e200], [1e-9, 2e-9, 3e-9], 1.0),
        ([1e-200, 2e-200, 3e-200], [3e200, 2e200, 1e200], -1.0),
    ],
)
def test_pearson(sizes: list[float], seconds: list[float], expected: float | None) -> None:
    assert correlation(sizes, seconds) == pytest.approx(expected)


def scattered(seed: int, share: float) -> list[float]:
    """200 factors around 1."""
    return [1 + share * random.Random(f"{seed} {m}").uniform(-1, 1) for m in range(200)]


def test_scatter_of_tasks_is_told_from_what_belongs_to_the_microbatch() -> None:
    sizes = [1.0 + m % 7 / 7 for m in range(200)]
    forward = [size * factor for size, factor in zip(sizes, scattered(1, 0.3), strict=True)]
    backward = [2 * size * factor for size, factor in zip(sizes, scattered(2, 0.3), strict=True)]
    measured = correlation(sizes, [sum(halves) for halves in zip(forward, backward, strict=True)])
    assert measured is not None
    assert measured < 0.92
    assert followed(sizes, forward, backward) == pytest.approx(1.0, abs=0.04)


def test_what_belongs_to_the_microbatch_and_is_not_its_size_stays() -> None:
    sizes, own = [1.0 + m % 7 / 7 for m in range(200)], scattered(1, 0.5)
    forward = [size * factor for size, factor in zip(sizes, own, strict=True)]
    backward = [2 * seconds for seconds in forward]
    assert followed(sizes, forward, backward) == pytest.approx(correlation(sizes, forward))


def test_halves_that_have_little_in_common_correct_nothing() -> None:
    sizes = scattered(3, 0.5)
    forward, backward = scattered(1, 0.5), scattered(2, 0.5)
    seconds = [sum(halves) for halves in zip(forward, backward, strict=True)]
    assert followed(sizes, forward, backward) == correlation(sizes, seconds)
    assert followed([1, 2, 3], [1, 2, 3], [0, 0, 0]) == pytest.approx(1.0), "a forward-only step has one half"


def test_the_least_counts_and_one_stage_that_knows_none_is_enough_to_know_none() -> None:
    assert least([1.0, 0.5, 0.9]) == 0.5
    assert least([1.0, None]) is None
    assert least([]) is None


def test_the_least_room_of_a_stage_counts() -> None:
    assert by_stage([(0, 3.0), (1, 1.5), (0, 2.0)], 2) == (2.0, 1.5)
    assert by_stage([(1, 3.0), (0, None), (1, None)], 2) == (None, 3.0)  # a follower's bytes count on its leader
    assert by_stage([(0, None)], 1) is None


def test_a_stage_says_how_many_average_microbatches_its_bytes_have_room_for() -> None:
    script = Script(TaskGraph.chain(2), 1, microbatches=0, limit=Limit(bytes=30))
    script.step = StepId(0, Mode.TRAIN, 2)
    script.told(ev.StepOpened(0, Mode.TRAIN, 2))
    for m, (held, output) in enumerate([(4, 1), (10, 0)]):
        task = T(f"F{m}@1")
        script.told(ev.Arrived(script.step, T(f"F{m}@0")), ev.Enqueued(task), ev.Completed(task, held, output=output))
    assert script.core.byte_room == 30 / 7.5
    assert Script(TaskGraph.chain(1), microbatches=2).core.byte_room is None, "bytes are not limited"


def shared(homes: tuple[int, ...] = (0, 0, 1, 1), **known: Any) -> Script:
    """A stage whose copy of replica 1 runs what is of its caller; by microbatch whose that is."""
    script = Script(TaskGraph.chain(1), microbatches=0, limit=known.pop("limit", None))
    script.step = StepId(0, Mode.TRAIN, len(homes))
    script.told(ev.StepOpened(0, Mode.TRAIN, len(homes), **known, pool=ev.Pool(0, 2, homes, depth=2)))
    script.told(*(ev.Granted(script.step, T(f"F{m}@0"), 1) for m, home in enumerate(homes) if home))
    return script


def test_where_replicas_share_forwards_the_bytes_of_those_that_ran_here_count() -> None:
    script = shared(limit=Limit(bytes=30))
    for m, held in enumerate((5, 10)):
        script.ran(f"F{m}@0", held=held)
    assert script.core.byte_room == 30 / 7.5


def test_where_replicas_share_forwards_the_times_of_those_that_ran_here_count() -> None:
    script = shared(sizes=(1.0, 3.0, 9.0, 9.0))
    for m, seconds in enumerate((1.0, 3.0)):
        for task in (f"F{m}@0", f"B{m}@0"):
            script.told(ev.Enqueued(T(task)), ev.Completed(T(task), seconds=seconds))
    assert script.core.size_correlation == pytest.approx(1.0)
    assert shared((1, 1), sizes=(1.0, 3.0)).core.size_correlation is None, "none has run here"


def test_a_stage_compares_what_all_its_tasks_took() -> None:
    script = Script(TaskGraph.chain(1), microbatches=0)
    assert script.core.size_correlation is None
    script.step = StepId(0, Mode.TRAIN, 3)
    script.told(ev.StepOpened(0, Mode.TRAIN, 3, (1.0, 2.0, 3.0)))
    for m, (forward, backward) in enumerate([(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]):
        for task, seconds in ((f"F{m}@0", forward), (f"B{m}@0", backward)):
            script.told(ev.Enqueued(T(task)), ev.Completed(T(task), seconds=seconds))
    assert script.core.size_correlation == pytest.approx(1.0)
    script.told(ev.ChunkReduced(0), ev.StepOpened(1, Mode.TRAIN, 2))
    assert script.core.size_correlation is None
