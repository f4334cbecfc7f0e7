"""A cost table of recorded steps: the times that were recorded, and a clear error where a step is not whole."""

from __future__ import annotations

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
from rrfp.lab.emulated import table_durations
from rrfp.lab.simulation import simulate
from rrfp.lab.traces.chrome_reader import TracedRun, read_chrome
from rrfp.lab.traces.measured_costs import MeasuredCosts, measured_costs
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import Layout
from rrfp.model.tasks import Kind, Task
from rrfp.testing.clock import EmulatedStage, SimulatedTransport, TimerLane, run_virtual
from rrfp.trace.chrome import write_chrome
from rrfp.trace.spans import MessageSpan, StepTrace, TaskSpan
from rrfp.transports.base import Message, MessageKind

#: Times in a file are rounded to nanoseconds, and a duration is the difference of two.
ROUNDING_S = 2e-9


def simulated(tables: Sequence[CostTable], path: Path, **method: Any) -> list[tuple[str, TracedRun]]:
    """A file of one simulated step a table, as read back."""
    traces = [simulate(table, **method).result.trace(step) for step, table in enumerate(tables)]
    write_chrome(path, traces)
    return [(f"{path}: {run.name}", run) for run in read_chrome(path)]


def assert_same_costs(ours: CostTable, wanted: CostTable) -> None:
    assert (ours.stages, ours.chunks, ours.placement, ours.microbatches) == (
        wanted.stages,
        wanted.chunks,
        wanted.placement,
        wanted.microbatches,
    )
    assert ours.split == wanted.split
    pairs = [(ours.forward, wanted.forward), (ours.backward, wanted.backward)]
    if ours.weight is not None and wanted.weight is not None:
        pairs.append((ours.weight, wanted.weight))
    for mine, theirs in (*pairs, *zip(ours.acting_latencies(), wanted.acting_latencies(), strict=True)):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=ROUNDING_S)


@pytest.mark.parametrize(
    ("chunks", "placement", "split"), [(1, "looped", False), (1, "looped", True), (2, "looped", True), (2, "v", True)]
)
def test_the_costs_of_a_simulated_step_come_back(tmp_path: Path, chunks: int, placement: Layout, split: bool) -> None:
    shape: Any = {"chunks": chunks, "placement": placement, "split": split, "jitter": "J2", "latency": "spike"}
    table = make_costs("mllm", 4, 6, **shape)
    measured = measured_costs(simulated([table], tmp_path / "t.json", hint="bfw", limit="2n"), skip_first=0)
    assert_same_costs(measured.table, table)
    assert measured.filled == 0
    again = simulate(measured.table, hint="bf", limit="1f1b").makespan
    assert again == pytest.approx(simulate(table, hint="bf", limit="1f1b").makespan, abs=1e-6)


def test_a_pipelines_own_trace_gives_the_costs_that_it_emulates(tmp_path: Path) -> None:
    """The runtime itself, in virtual time: its trace, gathered and written by save_trace."""
    table = make_costs("mllm", 3, 5, jitter="J1", latency="none")
    latency_s = 0.004

    def latency(stage: int, peer: int, message: Message) -> float:
        return latency_s if message.kind is MessageKind.OUTPUT else 0.0

    async def main() -> list[float]:
        lanes = [TimerLane() for _ in range(3)]
        durations = table_durations(table)
        programs = [EmulatedStage(TaskGraph.chain(3), durations, num_bytes=8, spend=lane.spend) for lane in lanes]
        transport = partial(SimulatedTransport, latency=latency)
        options: Any = {"transport": transport, "lane": lanes.__getitem__, "loop": "caller", "hint": "bf", "limit": 3}
        async with rrfp.local(programs, **options) as pipe:
            seconds = [(await pipe.step(microbatches=5, sizes=[5, 4, 3, 2, 0])).seconds for _ in range(4)]
            await pipe.evaluate(microbatches=5)
            await pipe.save_trace(tmp_path / "trace.json")
            return seconds

    seconds = run_virtual(main())
    measured = measured_costs([("trace", run) for run in read_chrome(tmp_path / "trace.json")])
    everywhere = np.full((2, 5), latency_s)
    assert_same_costs(measured.table, replace(table, latency_forward=everywhere, latency_backward=everywhere))
    assert measured.table.sizes == (5.0, 4.0, 3.0, 2.0, 0.0)
    assert measured.steps == 2
    assert measured.left_out == ("2 at the beginning",)
    assert measured.seconds == pytest.approx(seconds[-1], abs=ROUNDING_S)
    assert simulate(measured.table, hint="bf", limit=3).makespan == pytest.approx(seconds[-1], abs=1e-6)


def five(tmp_path: Path) -> list[tuple[str, TracedRun]]:
    """Five steps; the last one takes ten times as long as the first three, and the fourth three times."""
    table = make_costs("llm", 2, 3, latency="constant")
    return simulated([slower(table, by) for by in (1, 1, 1, 3, 10)], tmp_path / "t.json", strict="1f1b")


def slower(table: CostTable, by: float) -> CostTable:
    return replace(
        table,
        forward=table.forward * by,
        backward=table.backward * by,
        latency_forward=table.latency_forward * by,
        latency_backward=table.latency_backward * by,
    )


def test_the_typical_step_or_a_middle_of_all_or_one_by_its_number(tmp_path: Path) -> None:
    runs, table = five(tmp_path), make_costs("llm", 2, 3, latency="constant")
    typical = measured_costs(runs)  # the first two are warm-up
    assert_same_costs(typical.table, slower(table, 3))
    assert (typical.step, typical.steps, typical.left_out) == (3, 3, ("2 at the beginning",))
    assert typical.seconds == pytest.approx(runs[0][1].steps[3].end - runs[0][1].steps[3].start)
    median = measured_costs(runs, skip_first=0, step="median")
    assert_same_costs(median.table, table)
    assert (median.step, median.steps) == (None, 5)
    mean = measured_costs(runs, skip_first=1, step="mean")
    assert_same_costs(mean.table, slower(table, 3.75))
    slow = measured_costs(runs, step=4)
    assert_same_costs(slow.table, slower(table, 10))
    assert (slow.step, slow.steps, slow.left_out) == (4, 1, ("4 other step(s)",))
    twice = measured_costs([*runs, *runs], skip_first=1)
    assert (twice.steps, twice.left_out) == (8, ("2 at the beginning",))


def test_a_typical_step_keeps_what_an_average_over_steps_evens_out(tmp_path: Path) -> None:
    tables = [make_costs("mllm", 4, 8, step=step, jitter="J3", latency="wire") for step in range(7)]
    runs = simulated(tables, tmp_path / "t.json", hint="bf", limit="2n")
    took = sorted(trace.end - trace.start for trace in runs[0][1].steps)
    typical, median = (measured_costs(runs, skip_first=0, step=step).table for step in ("typical", "median"))
    assert simulate(typical, hint="bf", limit="2n").makespan == pytest.approx(took[3], abs=1e-6)
    assert simulate(median, hint="bf", limit="2n").makespan < 0.9 * took[3]


def test_steps_of_other_sizes_are_left_out_and_counted(tmp_path: Path) -> None:
    tables = [make_costs("llm", 2, m, latency="constant") for m in (4, 3, 4)]
    measured = measured_costs(simulated(tables, tmp_path / "t.json", strict="1f1b"), skip_first=0)
    assert (measured.steps, measured.table.microbatches) == (2, 4)
    assert measured.left_out == ("1 of 3 microbatches",)


def test_sizes_are_those_of_the_step_and_of_several_steps_only_where_they_agree(tmp_path: Path) -> None:
    tables = [make_costs("llm", 2, 3, step=step, latency="constant") for step in range(3)]
    sizes = [(1.0, 2.0, 3.0), (3.0, 2.0, 1.0), (1.0, 2.0, 3.0)]
    traces = [
        replace(simulate(table, hint="bf").result.trace(step), sizes=sizes[step]) for step, table in enumerate(tables)
    ]
    write_chrome(tmp_path / "t.json", traces)
    runs = [("t", run) for run in read_chrome(tmp_path / "t.json")]
    found = [measured_costs(runs, skip_first=0, step=step) for step in (0, 1, "median", "mean")]
    assert [each.table.sizes for each in found] == [sizes[0], sizes[1], None, None]
    assert all(each.has_sizes for each in found)
    same = [("t", replace(runs[0][1], steps=tuple(run for run in runs[0][1].steps if run.step != 1)))]
    assert measured_costs(same, skip_first=0, step="median").table.sizes == sizes[0]
    without = [("t", replace(runs[0][1], steps=(replace(runs[0][1].steps[0], sizes=None),)))]
    assert (measured_costs(without, skip_first=0).table.sizes, measured_costs(without, skip_first=0).has_sizes) == (
        None,
        False,
    )


def test_as_many_sizes_as_microbatches_are_needed() -> None:
    with pytest.raises(ConfigError, match=r"step 7: sizes has 2 entries, must have 1, one a microbatch$"):
        costs_of(replace(small(), sizes=(1.0, 2.0)))


def run_of(trace: StepTrace, stages: int = 2) -> list[tuple[str, TracedRun]]:
    return [("t.json: pipeline", TracedRun("pipeline", stages, (trace,)))]


def small() -> StepTrace:
    """One microbatch through two stages: tasks of a second, messages of half a second."""
    order = [Task(Kind.F, 0, 0), Task(Kind.F, 0, 1), Task(Kind.B, 0, 1), Task(Kind.B, 0, 0)]
    starts = (0.0, 1.5, 2.5, 4.0)
    spans = tuple(
        TaskSpan(task.virtual_stage, task, start, start + 1) for task, start in zip(order, starts, strict=True)
    )
    messages = (MessageSpan(0, 1, order[0], None, 1.5), MessageSpan(1, 0, order[2], None, 4.0))
    return StepTrace(7, 0.0, 5.0, spans, (), messages)


def costs_of(trace: StepTrace, stages: int = 2, **options: Any) -> MeasuredCosts:
    return measured_costs(run_of(trace, stages), **{"skip_first": 0, **options})


def test_a_message_without_its_time_gets_a_typical_one() -> None:
    trace = small()
    measured = costs_of(replace(trace, messages=trace.messages[:1]))
    assert (measured.measured, measured.filled) == (1, 1)
    assert measured.table.latency_backward.tolist() == [[0.5]]


def test_a_message_that_arrives_before_it_was_sent_by_another_hosts_clock_takes_no_time() -> None:
    trace = small()
    early = replace(trace.messages[0], arrived=0.9)
    assert costs_of(replace(trace, messages=(early, trace.messages[1]))).table.latency_forward.tolist() == [[0.0]]


def test_latency_may_be_a_model_instead() -> None:
    trace = replace(small(), messages=())
    with pytest.raises(ConfigError, match="no time of a message is recorded: give latency, one of: none, constant"):
        costs_of(trace)
    measured = costs_of(trace, latency="constant:0.25")
    assert measured.table.latency_forward.tolist() == [[0.25]]
    assert (measured.measured, measured.filled, measured.clock_error) == (0, 0, 0)


def test_a_stage_that_backward_does_not_split_has_weights_of_no_time() -> None:
    trace = small()
    weight = TaskSpan(1, Task(Kind.W, 0, 1), 3.5, 3.75)
    table = costs_of(replace(trace, tasks=(*trace.tasks, weight))).table
    assert table.weight is not None
    assert table.weight.tolist() == [[0.0], [0.25]]


def test_one_stage_has_no_messages() -> None:
    first, last = small().tasks[0], small().tasks[3]
    measured = costs_of(replace(small(), tasks=(first, last), messages=()), stages=1)
    assert (measured.table.forward.tolist(), measured.table.backward.tolist()) == ([[1.0]], [[1.0]])
    assert (measured.measured, measured.filled) == (0, 0)


def dropped(trace: StepTrace, index: int) -> StepTrace:
    return replace(trace, tasks=trace.tasks[:index] + trace.tasks[index + 1 :])


def changed(trace: StepTrace, index: int, **fields: Any) -> StepTrace:
    tasks = list(trace.tasks)
    tasks[index] = replace(tasks[index], **fields)
    return replace(trace, tasks=tuple(tasks))


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        (dropped(small(), 1), "F0@1 is missing: the file lacks a rank, or the rank's trace was cut"),
        (dropped(dropped(small(), 1), 1), "virtual stages ran on stages (0 on 0), must be on each of the 2 stages"),
        (changed(small(), 1, task=Task(Kind.F, 0, 2)), "F0@1 is missing"),
        (changed(small(), 1, task=Task(Kind.F, 10**30, 1)), "F1@0 is missing"),  # nor is a list made of so many
        (dropped(changed(small(), 1, task=Task(Kind.F, 0, 2)), 2), "virtual stage 1 is missing"),
        (changed(small(), 1, task=Task(Kind.F, 0, 0)), "F0@0 ran twice, must run once in a step"),
        (changed(small(), 1, stage=0), "virtual stage 1 ran on stages 0 and 1, must run on one"),
        (changed(small(), 1, end=1.0), "F0@1 ends 0.5 s before it starts"),
    ],
)
def test_a_step_that_is_not_whole_is_refused_with_its_task(trace: StepTrace, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        costs_of(trace)
    assert str(caught.value).startswith(f"t.json: pipeline, step 7: {message}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"skip_first": 1}, "t.json: pipeline has 1 training step(s), and skip-first is 1, must be less"),
        ({"step": 6}, "step is 6, must be one of: 7"),
        ({"step": "mode"}, "step is 'mode', must be a step's number or one of: typical, median, mean"),
        ({"step": True}, "step is True, must be a step's number or one of"),
        ({"latency": "slow"}, "latency is 'slow', must be one of: none, constant"),
    ],
)
def test_an_argument_that_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        costs_of(small(), **options)
    assert str(caught.value).startswith(message)


def test_a_file_of_evaluations_alone_is_refused() -> None:
    forwards = tuple(span for span in small().tasks if span.task.kind is Kind.F)
    with pytest.raises(ConfigError, match="has no training step, must have one"):
        costs_of(replace(small(), tasks=forwards))


def test_runs_of_different_pipelines_are_refused_by_name(tmp_path: Path) -> None:
    two = simulated([make_costs("llm", 2, 3)], tmp_path / "2.json", strict="1f1b")
    four = simulated([make_costs("llm", 4, 3, split=True)], tmp_path / "4.json", strict="zb-h1")
    with pytest.raises(ConfigError) as caught:
        measured_costs([*two, *four], skip_first=0)
    assert str(caught.value) == (
        f"{tmp_path}/4.json: pipeline, step 0 has 4 stages, split backward, {tmp_path}/2.json: pipeline, step 0 has "
        "2 stages, whole backward: must be one job's"
    )
