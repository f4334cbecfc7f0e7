"""The advice on a trace: what simulated steps are known to suffer from, and what the simulator gives for a setting."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rrfp
from rrfp.costs import CostTable, make_costs
from rrfp.errors import ConfigError
from rrfp.lab.advice.advice import Wishes, advise_file
from rrfp.lab.cluster.simulation import simulate_tensor_parallel
from rrfp.lab.emulated import table_durations
from rrfp.lab.simulation import planned_sizes, simulate
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Kind
from rrfp.testing.clock import EmulatedStage, SimulatedTransport, TimerLane, run_virtual
from rrfp.trace.chrome import ChromeRun, write_chrome, write_runs
from rrfp.trace.spans import StepTrace
from rrfp.transports.base import Message, MessageKind

#: Times in a file are rounded to nanoseconds, and a step sums some hundred of them.
ROUNDING_S = 1e-6

STEPS = 6


def tables(profile: str = "mllm", stages: int = 4, microbatches: int = 10, **shape: Any) -> list[CostTable]:
    shape = {"latency": "constant", **shape}
    return [make_costs(profile, stages, microbatches, step=step, **shape) for step in range(STEPS)]


def recorded(path: Path, steps: Sequence[CostTable], **method: Any) -> Path:
    """A trace of these steps; the file does not say how they ran."""
    write_chrome(path / "trace.json", [simulate(s, **method).result.trace(n) for n, s in enumerate(steps)])
    return path / "trace.json"


def advice_on(path: Path, **wishes: Any) -> Any:
    return advise_file(str(path), Wishes(skip_first=0, **wishes))


def mean_seconds(steps: Sequence[CostTable], **method: Any) -> float:
    return float(np.mean([simulate(step, **method).makespan for step in steps]))


def cause(advice: Any, name: str) -> Any:
    return next(each for each in advice.causes if each.name == name)


def setting(advice: Any, text: str) -> Any:
    return next(each for each in advice.settings if each.setting.startswith(text))


@pytest.mark.parametrize(
    ("method", "shape"),
    [
        ({"hint": "bf", "limit": "n"}, {"jitter": "J2"}),
        ({"hint": "slot-aware-pyramid", "limit": "1f1b"}, {"split": True}),
        ({"hint": "bfw", "limit": "2n"}, {"split": True, "chunks": 2, "placement": "v", "latency": "spike"}),
        ({"hint": "slot-aware", "limit": "3", "order": "natural"}, {"latency": "wire"}),
        ({"strict": "1f1b"}, {"jitter": "J1"}),
    ],
)
def test_a_replay_takes_as_long_as_the_steps_took(tmp_path: Path, method: Any, shape: Any) -> None:
    steps = tables(**shape)
    order = method.get("order", "free")
    trace = recorded(tmp_path, steps, **method)
    if order == "natural":
        add_job(trace, hint=method["hint"], limit=method["limit"], order=order)
    advice = advice_on(trace, **{name: text for name, text in method.items() if name != "order"})
    assert advice.predicted == pytest.approx(mean_seconds(steps, **method), abs=ROUNDING_S)
    assert advice.measured == pytest.approx(advice.predicted, abs=ROUNDING_S)
    assert advice.steps == tuple(range(STEPS))
    assert advice.doubt == ""


def add_job(trace: Path, **job: Any) -> None:
    """What save_trace writes beside the steps."""
    document = json.loads(trace.read_text())
    known = {"hint": None, "limit": None, "strict": None, "order": "free", "members": 1, "coordination": "leader"}
    document["otherData"] = {"job": {**known, "takes_offers": False, "is_serial": False, **job}}
    trace.write_text(json.dumps(document))


def test_a_tight_limit_is_named_and_a_larger_one_gives_what_the_simulator_does(tmp_path: Path) -> None:
    steps = tables(jitter="J2")
    advice = advice_on(recorded(tmp_path, steps, hint="bf", limit="1f1b"), hint="bf", limit="1f1b")
    now = mean_seconds(steps, hint="bf", limit="1f1b")
    memory, larger = cause(advice, "memory limit"), setting(advice, 'limit="2n"')
    free = mean_seconds(steps, hint="bf", limit=10)
    assert memory.seconds == pytest.approx(free, abs=ROUNDING_S)
    assert memory.share.value == pytest.approx(1 - free / now, abs=1e-5)
    assert memory.text.startswith("stage 0 waited for memory ")
    there = mean_seconds(steps, hint="bf", limit="2n")
    assert larger.seconds == pytest.approx(there, abs=ROUNDING_S)
    assert larger.saved.value == pytest.approx(1 - there / now, abs=1e-5)
    assert 0 < larger.saved.low <= larger.saved.value <= larger.saved.high
    assert (advice.held, larger.held) == (4, 8)
    assert str(larger).startswith(f'{memory.text}: limit="2n" (holds 8, now 4) predicts -')


def test_a_slow_link_is_named(tmp_path: Path) -> None:
    steps = tables("llm", latency="constant:0.001")
    rows = np.array([[1.0], [20.0], [1.0]])
    slowed = [
        replace(s, latency_forward=s.latency_forward * rows, latency_backward=s.latency_backward * rows) for s in steps
    ]
    advice = advice_on(recorded(tmp_path, slowed, hint="bf", limit="n"), hint="bf", limit="n")
    link = cause(advice, "link 1 - 2")
    assert "20.000 ms, on the middle one of the other links 1.000 ms" in link.text
    assert link.seconds == pytest.approx(mean_seconds(steps, hint="bf", limit="n"), abs=ROUNDING_S)
    assert link.share.value > 0.05
    assert [each.name for each in advice.causes if each.name.startswith("link")] == ["link 1 - 2"]
    longer = setting(advice, 'limit="auto"')
    assert longer.seconds == pytest.approx(mean_seconds(slowed, hint="bf", limit="auto"), abs=ROUNDING_S)
    even = advice_on(recorded(tmp_path, steps, hint="bf", limit="n"), hint="bf", limit="n")
    assert not [each.name for each in even.causes if each.name.startswith("link")]


def test_a_slow_stage_is_named_and_beside_a_replica_so_is_its_rank(tmp_path: Path) -> None:
    steps = tables("llm")
    slowed = [on_slow_rank(step, 2, 1.5) for step in steps]
    trace = recorded(tmp_path, slowed, hint="bf", limit="2n")
    slowest = cause(advice_on(trace, hint="bf"), "slowest stage")
    assert slowest.text.startswith("stage 2 takes ")
    traces = [
        [simulate(s, hint="bf", limit="2n").result.trace(n) for n, s in enumerate(each)] for each in (slowed, steps)
    ]
    write_runs(trace, [ChromeRun(f"replica {r}", range(4), own, 0.0) for r, own in enumerate(traces)])
    beside = cause(advice_on(trace, hint="bf"), "slowest stage")
    assert beside.text == "stage 2 takes +50% beside the same stage of other replicas"
    assert beside.seconds == pytest.approx(mean_seconds(steps, hint="bf", limit="2n"), rel=0.01)
    assert beside.share.low > 0.1


def on_slow_rank(step: CostTable, stage: int, factor: float) -> CostTable:
    column = np.ones((step.num_virtual_stages, 1))
    column[stage] = factor
    return replace(step, forward=step.forward * column, backward=step.backward * column)


def test_sizes_explain_what_microbatches_have_in_common_and_jitter_the_rest(tmp_path: Path) -> None:
    method = {"hint": "bf", "limit": "1f1b"}
    sized = advice_on(recorded(tmp_path, tables("zipf", jitter="J0"), **method), **method)
    assert cause(sized, "spread of microbatch sizes").share.value > 0.1
    assert abs(cause(sized, "jitter").share.value) < 1e-6
    jittered = advice_on(recorded(tmp_path, tables("llm", jitter="J3"), **method), **method)
    assert cause(jittered, "jitter").share.low > 0.05
    assert abs(cause(jittered, "spread of microbatch sizes").share.value) < 0.02


def test_sizes_a_split_and_more_microbatches_give_what_the_simulator_does(tmp_path: Path) -> None:
    split = tables(split=True)
    steps = [step.to_unsplit() for step in split]
    method: Any = {"hint": "slot-aware-pyramid", "limit": "1f1b"}
    advice = advice_on(recorded(tmp_path, steps, **method), **method)
    sized = [simulate(step, **method, sizes=planned_sizes(step)).makespan for step in steps]
    assert setting(advice, "step(sizes=...)").seconds == pytest.approx(np.mean(sized), abs=ROUNDING_S)
    assert setting(advice, "step(sizes=...)").is_bound
    halved = [replace(step, backward=step.backward / 2, weight=step.backward / 2) for step in steps]
    gain = 1 - mean_seconds(halved, **method) / mean_seconds(steps, **method)
    cut = setting(advice, "split=True").saved
    assert cut.low < gain <= cut.high
    twice = [twice_as_many(step, steps[(n + 1) % STEPS]) for n, step in enumerate(steps)]
    more = setting(advice, "20 microbatches a step")
    assert more.seconds == pytest.approx(mean_seconds(twice, **method) / 2, abs=ROUNDING_S)


def twice_as_many(step: CostTable, other: CostTable) -> CostTable:
    names = ("forward", "backward", "latency_forward", "latency_backward")
    rows: Any = {name: np.concatenate([getattr(step, name), getattr(other, name)], axis=1) for name in names}
    return CostTable(4, 1, "looped", 20, weight=None, **rows)


def test_a_strict_schedule_is_compared_with_hints_in_the_same_and_in_more_memory(tmp_path: Path) -> None:
    steps = tables(microbatches=20)
    sized = [replace(step, sizes=tuple(planned_sizes(step))) for step in steps]
    traces = [replace(simulate(s, strict="1f1b").result.trace(n), sizes=s.sizes) for n, s in enumerate(sized)]
    write_chrome(tmp_path / "trace.json", traces)
    advice = advice_on(tmp_path / "trace.json", strict="1f1b")
    same = setting(advice, 'hint="slot-aware-pyramid", limit="1f1b"')
    assert same.seconds == pytest.approx(mean_seconds(sized, hint="slot-aware-pyramid", limit="1f1b"), abs=ROUNDING_S)
    assert same.reason == "the order is fixed (1f1b)"
    assert same.held == advice.held == 4
    assert {each.name for each in advice.causes}.isdisjoint({"memory limit"})


def test_dispatch_and_the_ends_of_the_step_are_told_apart(tmp_path: Path) -> None:
    steps, dispatch = tables("llm", jitter="J1"), 0.002
    longer = [replace(s, forward=s.forward + dispatch, backward=s.backward + dispatch) for s in steps]
    traces = [behind(simulate(s, hint="bf", limit="n").result.trace(n), dispatch) for n, s in enumerate(longer)]
    write_chrome(tmp_path / "trace.json", [replace(trace, end=trace.end + 0.05) for trace in traces])
    advice = advice_on(tmp_path / "trace.json", hint="bf", limit="n")
    assert advice.ratio == pytest.approx(1, abs=0.002)
    found = cause(advice, "dispatch")
    assert "2.000 ms after it could" in found.text
    assert found.seconds == pytest.approx(mean_seconds(steps, hint="bf", limit="n") + 0.05, rel=0.005)
    ends = cause(advice, "start and end of the step")
    assert ends.share.value * advice.predicted == pytest.approx(0.05, rel=0.02)


def behind(trace: StepTrace, seconds: float) -> StepTrace:
    """The same step, whose tasks begin so much later and end as before."""
    return replace(trace, tasks=tuple(replace(span, start=span.start + seconds) for span in trace.tasks))


def test_the_coordination_of_groups_is_told(tmp_path: Path) -> None:
    steps = tables("llm", latency="constant")
    runs = [simulate_tensor_parallel(s, 2, hint="bf", limit="n", coordination="agreement") for s in steps]
    write_chrome(tmp_path / "trace.json", [each.simulation.result.trace(n) for n, each in enumerate(runs)])
    add_job(tmp_path / "trace.json", hint="bf", limit="n", members=2, coordination="agreement")
    advice = advice_on(tmp_path / "trace.json")
    assert advice.ratio == pytest.approx(1, abs=0.005)
    alone = mean_seconds(steps, hint="bf", limit="n")
    found = cause(advice, "coordination of groups")
    assert found.seconds == pytest.approx(alone, rel=0.005)
    assert setting(advice, 'coordination="leader"').is_bound


def job_seconds(
    steps: Sequence[CostTable], limit: Any, path: Path | None, *, takes_offers: bool = False, **stage: Any
) -> list[float]:
    """What each step of a job takes on three stages in virtual time; its trace goes to ``path``."""

    async def main() -> list[float]:
        lanes = [TimerLane(takes_offers=takes_offers) for _ in range(3)]
        programs = [EmulatedStage(TaskGraph.chain(3), lambda task: 0.0, spend=lane.spend, **stage) for lane in lanes]
        transport = partial(SimulatedTransport, latency=latency)
        options: Any = {"transport": transport, "lane": lanes.__getitem__, "loop": "caller"}
        seconds = []
        async with rrfp.local(programs, hint="bf", limit=limit, **options) as pipe:
            for step in steps:
                for program in programs:
                    program.durations = table_durations(step)
                seconds.append((await pipe.step(microbatches=8)).seconds)
            if path is not None:
                await pipe.save_trace(path)
        return seconds

    return run_virtual(main())


@pytest.mark.parametrize("takes_offers", [False, True])
def test_a_pipelines_own_trace_says_how_it_ran_and_another_limit_gives_what_it_takes(
    tmp_path: Path, takes_offers: bool
) -> None:
    """The runtime itself, in virtual time."""
    steps = tables("mllm", 3, 8, jitter="J2", latency="none")

    def took(limit: Any, path: Path | None = None) -> list[float]:
        return job_seconds(steps, limit, path, takes_offers=takes_offers, num_bytes=8)

    now, larger = took(rrfp.Limit(2), tmp_path / "trace.json"), took("n")
    advice = advice_on(tmp_path / "trace.json")
    assert advice.method == "8 microbatches on 3 stages, hint bf, limit 2"
    assert advice.measured == pytest.approx(np.mean(now), abs=ROUNDING_S)
    assert advice.predicted == pytest.approx(np.mean(now), abs=ROUNDING_S)
    assert setting(advice, 'limit="n"').seconds == pytest.approx(np.mean(larger), abs=ROUNDING_S)
    assert not [line for line in advice.assumed if line.startswith(("hint", "limit"))]


def test_a_limit_on_bytes_is_replayed_with_the_bytes_that_each_forward_left(tmp_path: Path) -> None:
    """The runtime itself, in virtual time, with microbatches that hold very different amounts."""
    steps, num_bytes = tables("mllm", 3, 8, jitter="J1", latency="none"), [9, 1, 7, 2, 8, 3, 1, 5]

    def took(limit: str, path: Path | None = None) -> list[float]:
        return job_seconds(steps, limit, path, held=lambda m, v: 1000 * num_bytes[m])

    now, larger = took("12kB", tmp_path / "trace.json"), took("24kB")
    advice = advice_on(tmp_path / "trace.json")
    assert advice.predicted == pytest.approx(np.mean(now), abs=ROUNDING_S)
    assert advice.measured == pytest.approx(np.mean(now), abs=ROUNDING_S)
    assert setting(advice, 'limit="24000B"').seconds == pytest.approx(np.mean(larger), abs=ROUNDING_S)


def latency(stage: int, peer: int, message: Message) -> float:
    return 0.004 if message.kind is MessageKind.OUTPUT else 0.0


def test_a_wrong_prediction_names_its_cause(tmp_path: Path) -> None:
    trace = recorded(tmp_path, tables(jitter="J2"), hint="bf", limit="1f1b")
    advice = advice_on(trace, hint="bf", limit="2n")
    assert advice.ratio < 0.95
    assert advice.doubt.startswith("in the recorded order of tasks it is off by 0.0%")
    assert "did not choose tasks as hint bf, limit 2n does" in advice.doubt
    assert advice.doubt in str(advice)


def test_what_the_trace_does_not_say_is_assumed_aloud(tmp_path: Path) -> None:
    steps = tables(microbatches=6)
    advice = advice_on(recorded(tmp_path, steps, hint="slot-aware-pyramid", limit="2n"))
    assert advice.predicted == pytest.approx(mean_seconds(steps, hint="slot-aware-pyramid", limit="2n"), abs=ROUNDING_S)
    text = str(advice)
    for assumed in ("the trace does not say how the job ran", "which one the job had", "a third to a half of backward"):
        assert assumed in text
    assert "shares overlap" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"left": 4}, "has 4 training step(s) to replay, must have at least 5: train more before save_trace, which"),
        ({"core_wait": 0.3}, "tasks shared cores: a stage's thread waited for one for "),
        ({"core_wait": 0.3}, "no more ranks than the host has idle cores, with OMP_NUM_THREADS=1; rrfp trace says"),
        ({"job": {"hint": "bf", "is_serial": True}}, "all stages ran in one process, whose tasks run one at a time"),
        ({"job": {"hint": "mine"}}, "hint is 'mine', must be one of"),
        ({"job": {"hint": "bf", "limit": "all"}}, "limit is 'all', must be a number of microbatches or one of"),
        ({"job": {"hint": 3}}, "otherData.job.hint is 3, must be a string that is not empty, or None"),
        ({"job": {"limit": {"bytes": 0}}}, "otherData.job.limit.microbatches is absent"),
    ],
)
def test_a_trace_that_predicts_nothing_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    table = make_costs("llm", 2, 4, latency="constant")
    traces = [simulate(table, hint="bf").result.trace(step) for step in range(change.get("left", STEPS))]
    if "core_wait" in change:
        traces = [replace(trace, core_waits={0: change["core_wait"], 1: 0.0}) for trace in traces]
    write_chrome(tmp_path / "trace.json", traces)
    if "job" in change:
        add_job(tmp_path / "trace.json", **change["job"])
    with pytest.raises(ConfigError) as refused:
        advice_on(tmp_path / "trace.json")
    assert message in str(refused.value)


def test_steps_unlike_most_are_left_out_and_counted(tmp_path: Path) -> None:
    counts = (4, 4, 3, 4, 4, 4, 4, 4)
    steps = [make_costs("llm", 2, m, step=step, latency="constant") for step, m in enumerate(counts)]
    advice = advise_file(str(recorded(tmp_path, steps, hint="bf")), Wishes(hint="bf", skip_first=1, steps=5))
    assert advice.steps == (3, 4, 5, 6, 7)
    assert advice.left_out == ("1 at the beginning", "1 not of 4 microbatches", "1 older")


def test_work_that_is_even_leaves_the_sum_as_it_was(tmp_path: Path) -> None:
    steps = [on_slow_rank(step, 3, 2.0) for step in tables("llm")]
    advice = advice_on(recorded(tmp_path, steps, hint="bf", limit="n"), hint="bf", limit="n")
    even = [with_even_work(step) for step in steps]
    balanced = cause(advice, "stage imbalance")
    assert balanced.seconds == pytest.approx(mean_seconds(even, hint="bf", limit="n"), rel=0.01)
    assert setting(advice, "a cut by layer times").is_bound


def with_even_work(step: CostTable) -> CostTable:
    work = step.work()
    column = (work.mean() / work)[:, np.newaxis]
    return replace(step, forward=step.forward * column, backward=step.backward * column)


def test_kinds_of_a_split_step_are_replayed_each(tmp_path: Path) -> None:
    steps = tables(split=True)
    advice = advice_on(recorded(tmp_path, steps, hint="bfw", limit="n"), hint="bfw", limit="n")
    assert not [each for each in advice.settings if each.setting == "split=True"]
    assert {kind for step in steps for kind in step.durations} == {*Kind}
