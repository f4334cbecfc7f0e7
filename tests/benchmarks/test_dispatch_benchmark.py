"""The dispatch benchmark: what it reads off a trace, and its verdicts on known samples."""

from __future__ import annotations

import gc

import pytest

from benchmarks.dispatch import arrivals
from benchmarks.dispatch.arrivals import ROWS, Samples, above, idle_times, spreads_of, starts
from benchmarks.dispatch.decisions import EngineSpeed
from benchmarks.dispatch.garbage import time_collections
from benchmarks.dispatch.outputs import CASES, WatchCost, time_watch
from benchmarks.dispatch.run import aims_of
from rrfp.model.tasks import Kind, Task
from rrfp.trace.spans import MessageSpan, StepTrace, TaskSpan


def test_a_trace_tells_when_tasks_started_after_their_messages_and_how_long_the_sender_was_idle() -> None:
    first, second = Task(Kind.F, 0, 0), Task(Kind.F, 1, 0)
    tasks = (
        TaskSpan(0, second, 2.5, 3.5),
        TaskSpan(0, first, 1.0, 2.0),
        TaskSpan(1, Task(Kind.F, 0, 1), 2.25, 2.3),
        TaskSpan(1, Task(Kind.F, 1, 1), 3.75, 3.8),
    )
    messages = (
        MessageSpan(0, 1, first, 2.125, 2.2),
        MessageSpan(0, 1, second, 3.5, 3.6),
    )
    trace = StepTrace(0, 0.0, 4.0, tasks, (), messages)

    assert sorted(starts(trace)) == [0.125, 0.25]
    assert idle_times(trace) == [0.5]


def test_rows_are_compared_with_the_bare_one_of_the_same_round() -> None:
    samples = {"row": [[5.0, 9.0, 5.0], [1.0], [2.0]], "bare": [[1.0], [0.5], [0.5]]}

    assert above(samples, "row", "bare") == 1.5
    assert spreads_of(samples)["row"].samples == 5


def samples_of(**seconds: float) -> Samples:
    """Two rounds of a hundred samples that take 20 us, but for rows that begin so."""

    def taken(row: str) -> float:
        return next((value for prefix, value in seconds.items() if row.startswith(prefix)), 20e-6)

    return {row: [[taken(row)] * 100] * 2 for row in ROWS}


@pytest.mark.parametrize(
    ("filed", "started", "met"),
    [(0.99e-3, 79e-6, [True] * 5), (0.99e-3, 81e-6, [True] * 2 + [False] * 2 + [True]), (1.1e-3, 111e-6, [False] * 5)],
)
def test_aims_are_absolute_for_filing_and_above_bare_messages_for_starts(
    filed: float, started: float, met: list[bool]
) -> None:
    watching = [WatchCost(CASES[0], 50e-6, 19e-6), WatchCost(CASES[1], 50e-6, 21e-6)]
    aims = aims_of(samples_of(filed=filed, started=started), [EngineSpeed(4, 256, 60_000.0)], watching)

    assert [aim.met for aim in aims] == [*met, True, False, True]
    assert [aim.value for aim in aims[:5]] == pytest.approx([filed * 1e6] * 2 + [started * 1e6 - 20] * 3)
    assert f"{arrivals.STARTED}, above {arrivals.BARE_SOCKET}, p50" in [aim.name for aim in aims]


def test_the_watch_over_outputs_is_timed_on_tasks_that_run() -> None:
    cost = time_watch(CASES[-1], rounds=1, microbatches=5)
    assert cost.without > 0


def test_a_collection_passes_over_what_was_frozen() -> None:
    times = time_collections(5)

    assert times.frozen < times.plain / 5
    assert gc.get_freeze_count() == 0
