"""The engine against timelines worked out by hand: every start, and what counts at one instant."""

from __future__ import annotations

import math

import pytest
from sim.tables import table

from rrfp import Hint, View
from rrfp.core.ready_set import ReadySet
from rrfp.core.usage import WaitCause
from rrfp.costs import CostTable
from rrfp.engine.engine import run
from rrfp.engine.record import EngineResult
from rrfp.errors import DeadlockError, HintError
from rrfp.hints.registry import HintSpec, create_hint, create_strict
from rrfp.memory.admission import Limit
from rrfp.model.tasks import Kind, Task
from rrfp.trace.spans import MessageSpan, WaitSpan


def dispatch(costs: CostTable, hint: HintSpec, limit: int | str = "2n") -> EngineResult:
    stages = range(costs.stages)
    limits = [Limit.resolve(limit, stage, costs.stages) for stage in stages]
    return run(costs, [create_hint(hint) for _ in stages], limits)


def strict(costs: CostTable, schedule: str) -> EngineResult:
    return run(costs, [create_strict(schedule) for _ in range(costs.stages)], [Limit()] * costs.stages)


def timeline(result: EngineResult) -> list[str]:
    """A line a stage: every task with its start."""
    return [" ".join(f"{span.task}:{span.start:g}" for span in stage) for stage in result.spans]


def test_one_stage_alternates_under_bf() -> None:
    # F0 0-1, B0 1-4, F1 4-6, B1 6-10.
    result = dispatch(table([[1, 2]], [[3, 4]]), "bf")
    assert timeline(result) == ["F0@0:0 B0@0:1 F1@0:4 B1@0:6"]
    assert (result.makespan, result.busy, result.waits, result.messages) == (10, (10,), (), ())


def test_one_microbatch_goes_there_and_back() -> None:
    # F 0-1, there at 3, F 3-5, there at 7, F 7-10; B 10-11, back at 13, B 13-14, back at 16, B 16-17.
    result = dispatch(table([[1], [2], [3]], [[1], [1], [1]], latency=2), "b-priority")
    assert timeline(result) == ["F0@0:0 B0@0:16", "F0@1:3 B0@1:13", "F0@2:7 B0@2:10"]
    assert result.makespan == 17


#: Stage 0: F0 0-1, F1 1-2; stage 1 gets them at 1.5 and 2.5.
TWO_BY_TWO = table([[1, 1], [1, 1]], [[2, 2], [2, 2]], latency=0.5)


def test_1f1b_to_the_letter() -> None:
    # Stage 1: F0 1.5-2.5, B0 -4.5 (back at 5), F1 -5.5, B1 -7.5 (back at 8). Stage 0: B0 5-7, B1 8-10.
    result = strict(TWO_BY_TWO, "1f1b")
    assert timeline(result) == ["F0@0:0 F1@0:1 B0@0:5 B1@0:8", "F0@1:1.5 B0@1:2.5 F1@1:4.5 B1@1:5.5"]
    assert result.makespan == 10
    assert [peaks.held for peaks in result.peaks] == [2, 1]


def test_gpipe_to_the_letter() -> None:
    # Stage 1: F0 1.5-2.5, F1 -3.5, B0 -5.5 (back at 6), B1 -7.5 (back at 8). Stage 0: B0 6-8, B1 8-10.
    result = strict(TWO_BY_TWO, "gpipe")
    assert timeline(result) == ["F0@0:0 F1@0:1 B0@0:6 B1@0:8", "F0@1:1.5 F1@1:2.5 B0@1:3.5 B1@1:5.5"]
    assert [peaks.held for peaks in result.peaks] == [2, 2]


def test_uniform_1f1b_takes_its_textbook_time() -> None:
    # (M + N - 1) x (F + B) = 5 x 3 without latency.
    rows, doubled = [[1.0] * 3] * 3, [[2.0] * 3] * 3
    assert strict(table(rows, doubled), "1f1b").makespan == 15


def test_strict_waits_where_a_hint_goes_on() -> None:
    # F0 is late on stage 1 (stage 0 takes 1 for each F, stage 1 takes 5 for F0 and 1 for F1); B takes 1.
    costs = table([[1, 1, 1], [5, 1, 1]], [[1, 1, 1], [1, 1, 1]])
    # 1F1B holds 2 on stage 0, so F2 waits for B0: stage 1 F0 1-6, B0 6-7, F1 7-8, B1 8-9; stage 0 B0 7-8, F2 8-9,
    # B1 9-10; stage 1 F2 9-10, B2 10-11; stage 0 B2 11-12.
    assert timeline(strict(costs, "1f1b")) == [
        "F0@0:0 F1@0:1 B0@0:7 F2@0:8 B1@0:9 B2@0:11",
        "F0@1:1 B0@1:6 F1@1:7 B1@1:8 F2@1:9 B2@1:10",
    ]
    # As a hint within 2N = 4 the same order lets F2 go at 2; stage 1 F2 9-10 is unchanged, B2 10-11, stage 0 B2 11-12.
    assert timeline(dispatch(costs, "1f1b"))[0] == "F0@0:0 F1@0:1 F2@0:2 B0@0:7 B1@0:9 B2@0:11"


def test_split_backward_fills_gaps_with_weights() -> None:
    # Latency 1; F 1, B 1, W 2. Stage 0: F0 0-1, F1 1-2. Stage 1: F0 2-3, B0 3-4 (back at 5), F1 4-5, B1 5-6 (back at
    # 7), W0 6-8, W1 8-10. Stage 0: B0 5-6, W0 6-8 (nothing else is there), B1 8-9, W1 9-11.
    ones, twos = [[1, 1]] * 2, [[2, 2]] * 2
    result = dispatch(table(ones, ones, twos, latency=1), "bfw")
    assert timeline(result) == [
        "F0@0:0 F1@0:1 B0@0:5 W0@0:6 B1@0:8 W1@0:9",
        "F0@1:2 B0@1:3 F1@1:4 B1@1:5 W0@1:6 W1@1:8",
    ]
    assert (result.makespan, result.busy) == (11, (8, 8))
    assert [(peaks.held, peaks.received) for peaks in result.peaks] == [(2, 1), (2, 1)]  # held until the end of W


def test_strict_schedule_on_split_costs_sends_the_gradient_before_the_weight() -> None:
    # F 0-1, F 1-2, B 2-3 (gradient leaves at 3), W 3-7; stage 0: B 3-4, W 4-8.
    result = strict(table([[1], [1]], [[1], [1]], [[4], [4]]), "1f1b")
    assert timeline(result) == ["F0@0:0 B0@0:3 W0@0:4", "F0@1:1 B0@1:2 W0@1:3"]


def test_limit_of_one_runs_one_microbatch_at_a_time() -> None:
    # F0 0-1, F0@1 1-2, B0@1 2-3, B0@0 3-4, and the same again from 4 on.
    result = dispatch(table([[1, 1], [1, 1]], [[1, 1], [1, 1]]), "bf", limit=1)
    assert timeline(result) == ["F0@0:0 B0@0:3 F1@0:4 B1@0:7", "F0@1:1 B0@1:2 F1@1:5 B1@1:6"]
    assert result.waits == (
        WaitSpan(1, WaitCause.INPUT, 0, 1),
        WaitSpan(0, WaitCause.MEMORY, 1, 3),
        WaitSpan(1, WaitCause.INPUT, 3, 5),
        WaitSpan(0, WaitCause.INPUT, 5, 7),
        WaitSpan(1, WaitCause.DRAINED, 7, 8),
    )


def test_arrival_at_the_very_instant_counts_before_the_decision() -> None:
    # Stage 1 ends F0 at 2.5; F1 leaves stage 0 at 2 and arrives at 2 + 0.5: F-priority sees it, and takes it before B0.
    assert timeline(dispatch(TWO_BY_TWO, "f-priority"))[1].startswith("F0@1:1.5 F1@1:2.5 B0@1:3.5")


def test_arrival_an_instant_later_comes_too_late() -> None:
    forward = TWO_BY_TWO.latency_forward.copy()
    forward[0, 1] = math.nextafter(0.5, 1)
    assert 2 + forward[0, 1] == 2.5, "the sum rounds to the same instant"
    forward[0, 1] = 0.5 + 2**-50
    assert 2 + forward[0, 1] > 2.5
    costs = table(TWO_BY_TWO.forward.tolist(), TWO_BY_TWO.backward.tolist())
    late = CostTable(2, 1, "looped", 2, costs.forward, costs.backward, None, forward, TWO_BY_TWO.latency_backward)
    assert timeline(dispatch(late, "f-priority"))[1].startswith("F0@1:1.5 B0@1:2.5 F1@1:4.5")


def test_arrival_is_end_plus_latency_exactly() -> None:
    costs = table([[0.1, 0.2], [0.3, 0.4]], [[0.1, 0.1], [0.1, 0.1]], latency=0.7)
    result = dispatch(costs, "bf")
    ends = {span.task: span.end for spans in result.spans for span in spans}
    assert len(result.messages) == 4
    for message in result.messages:
        assert message.sent == ends[message.task]
        assert message.arrived == ends[message.task] + 0.7
    assert result.messages[0] == MessageSpan(0, 1, Task(Kind.F, 0, 0), 0.1, 0.1 + 0.7)


def test_received_peak_counts_arrived_outputs_whose_task_has_not_started() -> None:
    # Stage 1 runs F0 from 1 to 11; F1 arrives at 2, F2 at 3. Its gradients reach stage 0 one at a time and are used at
    # once.
    result = dispatch(table([[1, 1, 1], [10, 1, 1]], [[1, 1, 1], [1, 1, 1]]), "bf")
    assert [peaks.received for peaks in result.peaks] == [1, 2]


def test_tensor_used_at_the_instant_of_its_arrival_counts_as_received() -> None:
    result = dispatch(table([[1], [1]], [[1], [1]]), "bf")
    assert [peaks.received for peaks in result.peaks] == [1, 1]


@pytest.mark.parametrize("method", ["bf", "fb", "b-priority", "f-priority", "bfw", "gpipe", "1f1b"])
def test_zero_durations_and_latencies_take_no_time(method: str) -> None:
    zeros = [[0.0] * 3] * 3
    result = dispatch(table(zeros, zeros, zeros), method)
    assert result.makespan == 0
    assert [len(spans) for spans in result.spans] == [9, 9, 9]


def test_chunks_of_one_stage_hand_over_at_once() -> None:
    # One stage holds virtual stages 0 and 1: the latency between them does not act.
    result = dispatch(table([[1], [1]], [[1], [1]], latency=5, chunks=2), "bf")
    assert timeline(result) == ["F0@0:0 F0@1:1 B0@1:2 B0@0:3"]
    assert result.messages == ()


def test_v_placement_turns_round_on_the_last_stage() -> None:
    # Stage 0 holds v 0 and 3, stage 1 holds 1 and 2; latency 1 acts between 0-1 and 2-3 only.
    ones = [[1]] * 4
    result = dispatch(table(ones, ones, latency=1, chunks=2, placement="v"), "bf")
    assert timeline(result) == ["F0@0:0 F0@3:5 B0@3:6 B0@0:11", "F0@1:2 F0@2:3 B0@2:8 B0@1:9"]
    assert result.makespan == 12


class Silent(Hint):
    """Answers on stage 0 only."""

    may_wait = True

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        return next(iter(ready)) if view.stage == 0 else None


def test_deadlock_names_stage_task_and_who_owes() -> None:
    with pytest.raises(DeadlockError) as caught:
        dispatch(TWO_BY_TWO, Silent)
    assert str(caught.value).splitlines() == [
        "deadlock: every stage is idle and nothing is in flight",
        "  stage 0 waits for: B0@0 (B0@1 owed by stage 1)",
        "  stage 1 waits for: F0@1 (ready, but hint Silent does not choose it)",
    ]


def test_deadlock_of_a_schedule_that_needs_more_memory_than_there_is() -> None:
    # 1F1B wants F1 next on stage 0, which holds F0 and may hold no more; B0 is there, and the order does not take it.
    with pytest.raises(DeadlockError) as caught:
        run(TWO_BY_TWO, [create_strict("1f1b"), create_strict("1f1b")], [Limit(1), Limit(1)])
    assert str(caught.value).splitlines()[1:] == [
        "  stage 0 waits for: B0@0 (ready, but hint Strict does not choose it)",
        "  stage 1 waits for: F1@1 (F1@0 owed by stage 0)",
    ]


def test_hint_that_answers_with_a_task_that_is_not_ready_is_an_error() -> None:
    class Wrong(Hint):
        def choose(self, ready: ReadySet, view: View) -> Task | None:
            return Task(Kind.B, 1, view.stage)

    with pytest.raises(HintError, match=r"hint Wrong chose B1@0 on stage 0; ready are: ReadySet\(F0@0 F1@0\)"):
        dispatch(TWO_BY_TWO, Wrong)
