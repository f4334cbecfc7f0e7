"""The real shell in virtual time and the engine tell the same: every order, start, wait, message and peak, bit by bit.

Results are compared with ``==``: spans are frozen dataclasses of floats, so nothing here is approximate.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from batches import examples
from hypothesis import event, given
from hypothesis import strategies as st
from sim.shell.runs import run_shell, run_shell_steps
from sim.tables import table

from rrfp import Hint, View
from rrfp.core.ready_set import ForcedOrder, ReadySet, natural_order
from rrfp.core.usage import WaitCause
from rrfp.costs import CostTable, make_costs, with_jitter, with_latency
from rrfp.engine.engine import graph_of, run
from rrfp.engine.record import EngineResult
from rrfp.errors import ConfigError, DeadlockError, HintError, RrfpError
from rrfp.hints.registry import create_hint, create_strict, hint_names
from rrfp.memory.admission import Limit
from rrfp.memory.size_order import correlation
from rrfp.model.placement import Layout
from rrfp.model.tasks import Kind, Mode, Task
from rrfp.schedules.registry import make_schedule, schedule_names


@dataclass(frozen=True)
class Case:
    """One step, for either of the two."""

    costs: CostTable
    hint: Callable[[], Hint] = field(repr=False)
    limits: tuple[Limit, ...]
    method: str = "?"
    sizes: tuple[float, ...] | None = None
    in_order: Collection[ForcedOrder] = ()
    takes_offers: bool = False

    def outcome(self, simulate: Callable[..., EngineResult]) -> EngineResult | type[RrfpError]:
        """What happened, or the kind of error."""
        try:
            hints = [self.hint() for _ in self.limits]
            result = simulate(
                self.costs,
                hints,
                self.limits,
                sizes=self.sizes,
                in_order=self.in_order,
                takes_offers=self.takes_offers,
            )
        except RrfpError as error:
            return type(error)
        # Messages that leave at one instant do so in no order.
        messages = tuple(sorted(result.messages, key=lambda m: (m.source, m.target, m.task)))
        peaks = tuple(
            replace(peaks, received=0) if self.takes_offers and is_tied(result, stage) else peaks
            for stage, peaks in enumerate(result.peaks)
        )
        return replace(result, messages=messages, peaks=peaks)


def is_tied(result: EngineResult, stage: int) -> bool:
    """Whether an input reached ``stage`` at the very instant at which one of its tasks started.

    A lane takes an offered task, and its inputs, before or after such an arrival is counted: neither order is wrong.
    """
    starts = {span.start for span in result.spans[stage]}
    return any(message.target == stage and message.arrived in starts for message in result.messages)


def named(method: str, strict: bool = False) -> Callable[[], Hint]:
    return lambda: (create_strict if strict else create_hint)(method)


def dispatch(costs: CostTable, method: str, limit: int | str = "2n", *, strict: bool = False) -> Case:
    limits = [Limit() if strict else Limit.resolve(limit, stage, costs.stages) for stage in range(costs.stages)]
    return Case(costs, named(method, strict), tuple(limits), method)


def methods(costs: CostTable, among: Sequence[str]) -> list[str]:
    """The names that are no schedule, or one that fits the table."""

    def fits(name: str) -> bool:
        try:
            return name not in schedule_names() or bool(make_schedule(name, graph_of(costs), costs.microbatches))
        except ConfigError:
            return False

    return [name for name in among if fits(name)]


#: Durations and latencies are drawn from one of these; None: any float.
LEVELS: Sequence[Sequence[float] | None] = ([0.0], [0.0, 1.0], [1.0, 2.0, 3.0], [0.0, 0.03, 0.07, 0.26], None)


@st.composite
def random_tables(draw: st.DrawFn) -> CostTable:
    """N 1-4, C 1-3, M 1-6: full of ties and zeros, or of arbitrary times."""
    stages, chunks, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 6))
    placement: Layout = draw(st.sampled_from(["looped", "v"]))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    times, delays = draw(st.sampled_from(LEVELS)), draw(st.sampled_from(LEVELS))

    def matrix(rows: int, levels: Sequence[float] | None) -> np.ndarray:
        shape = (rows, microbatches)
        return random.exponential(1e-2, shape) if levels is None else random.choice(levels, shape)

    count = stages * chunks
    weight = matrix(count, times) if draw(st.booleans()) else None
    there, back = matrix(count - 1, delays), matrix(count - 1, delays)
    held = random.choice(draw(st.sampled_from([[1.0], [1.0, 2.0, 5.0]])), (count, microbatches))
    forward, backward = matrix(count, times), matrix(count, times)
    sized = held if draw(st.booleans()) else None
    return CostTable(stages, chunks, placement, microbatches, forward, backward, weight, there, back, sized)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    costs = draw(random_tables())
    schedules = methods(costs, schedule_names())
    strict = bool(schedules) and draw(st.integers(0, 3)) == 0
    method = draw(st.sampled_from(schedules if strict else methods(costs, hint_names())))
    one: st.SearchStrategy[int | str] = st.sampled_from([1, 2, 3, 4, "1f1b", "2n"])
    each = st.lists(one, min_size=costs.stages, max_size=costs.stages)
    specs = draw(st.one_of(one.map(lambda spec: [spec] * costs.stages), each))
    limits = [Limit.resolve(spec, stage, costs.stages) for stage, spec in enumerate(specs)]
    if strict and draw(st.integers(0, 4)):  # else it may need more than it has
        limits = [Limit()] * costs.stages
    counts_bytes = costs.held is not None and not strict and draw(st.booleans())
    if counts_bytes:
        limits = [Limit(draw(st.none() | st.integers(1, 4)), draw(st.integers(1, 15))) for _ in limits]
    sizes = draw(st.none() | st.tuples(*[st.sampled_from([1.0, 2.0, 7.5])] * costs.microbatches))
    forced = [(kind, v) for v in range(costs.num_virtual_stages) for kind in (Kind.F, Kind.B)]
    natural = sorted(natural_order(graph_of(costs)))
    in_order = draw(st.just([]) | st.lists(st.sampled_from(forced), max_size=4) | st.just(natural))
    name = f"strict {method}" if strict else method
    takes_offers = draw(st.booleans())
    return Case(costs, named(method, strict), tuple(limits), name, sizes, in_order, takes_offers)


@examples(400)
@given(cases())
def test_shell_and_engine_tell_the_same_of_any_pipeline(case: Case) -> None:
    expected = case.outcome(run)
    event(case.method)
    event("ran" if isinstance(expected, EngineResult) else expected.__name__)
    event("with a limit on bytes" if any(limit.bytes for limit in case.limits) else "without a limit on bytes")
    event("with offers" if case.takes_offers else "without offers")
    assert case.outcome(run_shell) == expected


@pytest.mark.parametrize("latency", ["none", "wire", "spike"])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("takes_offers", [False, True])
def test_they_agree_on_waits_by_choice(latency: str, split: bool, takes_offers: bool) -> None:
    costs = make_costs("llm", 4, 16, seed=5, jitter="J2", latency=latency, split=split)
    case = replace(dispatch(costs, "slot-aware", "1f1b"), takes_offers=takes_offers)
    expected = case.outcome(run)
    assert isinstance(expected, EngineResult)
    assert any(wait.cause is WaitCause.CHOICE for wait in expected.waits)
    assert case.outcome(run_shell) == expected


@pytest.mark.parametrize("method", ["bf", "fb", "b-priority", "f-priority", "bfw"])
@pytest.mark.parametrize("limit", ["1f1b", "2n"])
@pytest.mark.parametrize("takes_offers", [False, True])
def test_they_agree_on_a_realistic_step(method: str, limit: str, takes_offers: bool) -> None:
    costs = with_jitter(with_latency(make_costs("mllm", stages=4, microbatches=12, seed=3), "wire"), "J2", seed=5)
    case = replace(dispatch(costs, method, limit), takes_offers=takes_offers)
    expected = case.outcome(run)
    assert isinstance(expected, EngineResult)
    assert case.outcome(run_shell) == expected


def test_an_offered_task_was_decided_before_the_task_before_it_ended() -> None:
    # Stage 1 runs F0 1-2 and B0 2-3. The gradient is at stage 0 at 3, when its F2 ends: too late for the offer of F3.
    costs = table([[1] * 4] * 2, [[1] * 4] * 2)
    case = Case(costs, named("b-priority"), (Limit(), Limit()))
    with_offers = replace(case, takes_offers=True)

    def first_stage(outcome: EngineResult | type[RrfpError]) -> str:
        assert isinstance(outcome, EngineResult)
        return " ".join(f"{span.task}:{span.start:g}" for span in outcome.spans[0])

    assert first_stage(case.outcome(run)).startswith("F0@0:0 F1@0:1 F2@0:2 B0@0:3 F3@0:4")
    assert first_stage(with_offers.outcome(run)).startswith("F0@0:0 F1@0:1 F2@0:2 F3@0:3 B0@0:4")
    assert with_offers.outcome(run_shell) == with_offers.outcome(run)


def test_messages_that_overtake_each_other_arrive_when_the_table_says() -> None:
    # F0 takes 10 to stage 1, F1 takes 1: sent at 1 and 2, they arrive at 11 and 3, in one channel.
    costs = table([[1, 1], [1, 1]], [[1, 1], [1, 1]])
    slow = CostTable(2, 1, "looped", 2, costs.forward, costs.backward, None, [[10, 1]], costs.latency_backward)  # type: ignore[arg-type]
    result = run_shell(slow, [create_hint("bf")] * 2, [Limit()] * 2)
    assert [(str(span.task), span.start) for span in result.spans[1]] == [
        ("F1@1", 3),
        ("B1@1", 4),
        ("F0@1", 11),
        ("B0@1", 12),
    ]
    natural = run_shell(slow, [create_hint("bf")] * 2, [Limit()] * 2, in_order=natural_order(graph_of(slow)))
    assert " ".join(str(span.task) for span in natural.spans[1]) == "F0@1 B0@1 F1@1 B1@1"
    assert natural.spans[1][0].start == 11


def test_v_placement_turns_round_on_the_last_stage() -> None:
    # Stage 0 holds v 0 and 3, stage 1 holds 1 and 2, which hand over at once; latency 1 acts between 0-1 and 2-3 only.
    ones = [[1]] * 4
    costs = table(ones, ones, latency=1, chunks=2, placement="v")
    result = run_shell(costs, [create_hint("bf") for _ in range(2)], [Limit(), Limit()])
    assert [" ".join(f"{s.task}:{s.start:g}" for s in stage) for stage in result.spans] == [
        "F0@0:0 F0@3:5 B0@3:6 B0@0:11",
        "F0@1:2 F0@2:3 B0@2:8 B0@1:9",
    ]
    assert len(result.messages) == 4


def test_chunks_of_one_stage_need_no_message() -> None:
    costs = table([[1], [2], [4]], [[1], [1], [1]], [[1], [1], [1]], latency=5, chunks=3)
    case = dispatch(costs, "bfw")
    result = case.outcome(run_shell)
    assert isinstance(result, EngineResult)
    assert (result.messages, result.makespan) == ((), 13)
    assert result == case.outcome(run)


def test_consecutive_steps_are_alike() -> None:
    costs = table([[1, 2, 1], [2, 1, 1]], [[1, 1, 2], [2, 2, 1]], latency=0.5)  # halves: their sums are exact
    expected = dispatch(costs, "bf").outcome(run)
    hints, limits = [create_hint("bf") for _ in range(2)], [Limit.resolve("2n", stage, 2) for stage in range(2)]
    results = run_shell_steps(costs, hints, limits, [Mode.TRAIN] * 3)
    assert [
        replace(r, messages=tuple(sorted(r.messages, key=lambda m: (m.source, m.target, m.task)))) for r in results
    ] == [expected] * 3


def test_forward_only_frees_a_slot_when_the_next_stage_is_done_with_the_output() -> None:
    # K = 1. Stage 0: F0 0-1, there at 3; stage 1 runs it 3-5 and says so at once: F1 5-6, there at 8, 8-10.
    costs = table([[1, 1], [2, 2]], [[9, 9], [9, 9]], latency=2)
    (result,) = run_shell_steps(costs, [create_hint("bf") for _ in range(2)], [Limit(1), Limit(1)], [Mode.FORWARD])
    assert [[(str(s.task), s.start) for s in stage] for stage in result.spans] == [
        [("F0@0", 0), ("F1@0", 5)],
        [("F0@1", 3), ("F1@1", 8)],
    ]
    assert (result.makespan, [peaks.held for peaks in result.peaks]) == (10, [1, 1])


def test_forward_only_and_training_steps_alternate() -> None:
    costs = table([[1, 1], [1, 1]], [[2, 2], [2, 2]], latency=0.5)
    modes = [Mode.FORWARD, Mode.TRAIN, Mode.FORWARD, Mode.TRAIN]
    results = run_shell_steps(costs, [create_hint("bf") for _ in range(2)], [Limit(2), Limit(2)], modes)
    forward, train, again, last = (replace(result, messages=()) for result in results)
    assert (forward.makespan, forward) == (3.5, again)
    assert train == last
    assert train.makespan == run(costs, [create_hint("bf") for _ in range(2)], [Limit(2), Limit(2)]).makespan


class Deaf(Hint):
    """Answers on stage 0 only."""

    may_wait = True

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        return next(iter(ready)) if view.stage == 0 else None


@pytest.mark.parametrize("stall_after", [None, 10.0, 3600.0])
def test_a_deadlock_is_found_by_the_ranks_own_watchdog_in_no_time(stall_after: float | None) -> None:
    began = time.monotonic()
    with pytest.raises(DeadlockError) as caught:
        run_shell(table([[1, 1], [1, 1]], [[2, 2], [2, 2]]), [Deaf(), Deaf()], [Limit()] * 2, stall_after=stall_after)
    assert time.monotonic() - began < 5
    assert [line.split(" [host")[0] for line in str(caught.value).splitlines()] == [
        "deadlock in step 0: every rank is idle and nothing is in flight",
        "  stage 0 waits for: B0@0 (B0@1 owed by stage 1); B1@0 (B1@1 owed by stage 1)",
        "  stage 1 waits for: F0@1 (ready, but hint Deaf does not choose it); B0@1 (F0@1 owed by stage 1); "
        "F1@1 (ready, but hint Deaf does not choose it); B1@1 (F1@1 owed by stage 1)",
    ]


def test_a_strict_schedule_without_the_memory_it_needs_deadlocks_in_both() -> None:
    costs = table([[1, 1], [1, 1]], [[2, 2], [2, 2]], latency=0.5)
    case = Case(costs, named("1f1b", strict=True), (Limit(1), Limit(1)))
    assert (case.outcome(run), case.outcome(run_shell)) == (DeadlockError, DeadlockError)


def test_a_hint_that_breaks_its_contract_is_the_same_error() -> None:
    class Wrong(Hint):
        def choose(self, ready: ReadySet, view: View) -> Task | None:
            return Task(Kind.B, 1, view.stage)

    with pytest.raises(HintError, match="hint Wrong chose B1@0 on stage 0"):
        run_shell(table([[1, 1], [1, 1]], [[2, 2], [2, 2]]), [Wrong(), Wrong()], [Limit()] * 2)


def test_hints_are_told_the_sizes() -> None:
    seen = []

    class Curious(Hint):
        def choose(self, ready: ReadySet, view: View) -> Task | None:
            seen.append(view.sizes)
            return next(iter(ready))

    run_shell(table([[1, 1]], [[1, 1]]), [Curious()], [Limit()], sizes=[3, 4.5])
    assert set(seen) == {(3.0, 4.5)}


def test_all_ranks_know_the_least_correlation_of_the_last_step_whose_sizes_said_something() -> None:
    seen: list[tuple[int, float | None]] = []

    class Curious(Hint):
        def open_step(self, view: View) -> None:
            seen.append((view.stage, view.size_correlation))

        def choose(self, ready: ReadySet, view: View) -> Task | None:
            return next(iter(ready))

    costs = table([[1, 2, 4], [1, 4, 2]], [[1, 2, 4], [1, 4, 2]])
    sizes = [(1.0, 2.0, 4.0), (5.0, 5.0, 5.0), None, (1.0, 4.0, 2.0), None]
    modes = [Mode.TRAIN, Mode.TRAIN, Mode.TRAIN, Mode.FORWARD, Mode.TRAIN]
    run_shell_steps(costs, [Curious(), Curious()], [Limit(), Limit()], modes, sizes_of_steps=sizes)
    expected = correlation([1, 2, 4], [2, 8, 4])
    assert seen[:2] == [(0, None), (1, None)]
    assert [stage for stage, _ in seen] == [0, 1] * 5
    assert [measured for _, measured in seen[2:]] == pytest.approx([expected] * 8)


def test_nothing_is_left_running() -> None:
    threads = threading.active_count()
    run_shell(table([[1]] * 4, [[1]] * 4, chunks=2), [create_hint("bf") for _ in range(2)], [Limit()] * 2)
    assert threading.active_count() == threads
    gc.collect()  # an unclosed loop or socket, or a task that was never awaited, would warn, and warnings are errors
