"""Chrome-JSON: what Perfetto needs to show slices on the right threads and to draw every arrow."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rrfp.core.usage import WaitCause
from rrfp.costs import make_costs
from rrfp.errors import ConfigError
from rrfp.lab.simulation import simulate
from rrfp.lab.traces.chrome_reader import read_chrome
from rrfp.model.tasks import Kind, Task
from rrfp.trace.chrome import STEPS_THREAD, chrome_events, write_chrome
from rrfp.trace.spans import MessageSpan, StepTrace, TaskSpan, WaitSpan

Events = list[dict[str, Any]]

SEND, READ = Task(Kind.F, 0, 0), Task(Kind.F, 0, 1)


def of_phase(events: Events, phase: str) -> Events:
    return [event for event in events if event["ph"] == phase]


def slices(events: Events, cat: str) -> Events:
    return [event for event in of_phase(events, "X") if event["cat"] == cat]


def enclosing(events: Events, arrow_end: dict[str, Any]) -> list[str]:
    """The computations of the arrow end's thread with that end strictly inside."""
    return [
        s["name"]
        for s in slices(events, "computation")
        if s["tid"] == arrow_end["tid"] and s["ts"] < arrow_end["ts"] < s["ts"] + s["dur"]
    ]


def one_message(reader: TaskSpan | None, *, sender_end: float = 1.0) -> StepTrace:
    tasks = [TaskSpan(0, SEND, 0.0, sender_end)] + ([reader] if reader else [])
    return StepTrace(0, 0.0, 3.0, tuple(tasks), (), (MessageSpan(0, 1, SEND, sender_end, 1.5),))


@pytest.mark.parametrize("traces", [3, "abc", [3], one_message(None)])
def test_what_is_no_list_of_traces_is_refused(traces: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^traces is .*, must be a list with result\.trace of each step$"):
        write_chrome(tmp_path / "trace.json", traces)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", [3, None, "a\0b", "\ud800"])
def test_what_is_no_path_is_refused(path: Any) -> None:
    with pytest.raises(ConfigError, match=r"^path is .*, must be a path$"):
        write_chrome(path, [])


@pytest.fixture
def steps() -> list[StepTrace]:
    """Three steps on one clock."""
    result, start = [], 100.0
    for step in range(3):
        costs = make_costs("mllm", 4, 6, step=step, jitter="J2", latency="wire")
        trace = simulate(costs, hint="bf", limit=3).result.trace(step)
        shifted = [replace(s, start=s.start + start, end=s.end + start) for s in trace.tasks]
        waits = [replace(s, start=s.start + start, end=s.end + start) for s in trace.waits]
        result.append(replace(trace, start=start, end=start + trace.end, tasks=tuple(shifted), waits=tuple(waits)))
        start += trace.end + 0.001
    return result


def test_file_opens_as_json_with_named_threads(steps: list[StepTrace], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_chrome(path, steps, name="bf")
    events: Events = json.loads(path.read_text())["traceEvents"]
    names = {(e["name"], e["tid"]): e["args"]["name"] for e in of_phase(events, "M") if "name" in e["args"]}
    assert names == {
        ("process_name", 0): "bf",
        ("thread_name", 0): "steps",
        **{("thread_name", i + 1): f"stage {i}" for i in range(4)},
    }
    assert {event["pid"] for event in events} == {1}
    assert [s["name"] for s in slices(events, "step")] == ["step 0", "step 1", "step 2"]


def test_every_task_is_a_slice_of_its_stage(steps: list[StepTrace]) -> None:
    found = slices(chrome_events(steps), "computation")
    assert len(found) == sum(len(trace.tasks) for trace in steps) == 3 * 4 * 6 * 2
    first = steps[1].tasks[0]
    [event] = [e for e in found if e["name"] == "F0@0" and e["args"]["step"] == 1]
    assert event["args"] == {"kind": "forward", "microbatch": 0, "virtual stage": 0, "step": 1}
    assert event["tid"] == 1
    assert event["ts"] == pytest.approx((first.start - 100.0) * 1e6, abs=1e-3)
    assert event["dur"] == pytest.approx((first.end - first.start) * 1e6, abs=2e-3)


def test_slices_of_a_thread_never_overlap(steps: list[StepTrace]) -> None:
    events = chrome_events(steps)
    for tid in {event["tid"] for event in events} - {STEPS_THREAD}:
        found = sorted((e["ts"], e["ts"] + e["dur"]) for e in of_phase(events, "X") if e["tid"] == tid)
        assert all(after[0] >= before[1] - 1e-6 for before, after in itertools.pairwise(found))
    assert {s["name"] for s in slices(events, "wait")} == {"wait: input", "wait: memory", "wait: nothing left"}


def test_every_message_is_an_arrow_between_its_two_tasks(steps: list[StepTrace]) -> None:
    events = chrome_events(steps)
    starts, ends = of_phase(events, "s"), of_phase(events, "f")
    assert len(starts) == sum(len(trace.messages) for trace in steps) == 3 * 6 * 3 * 2
    assert max(Counter(event["id"] for event in starts).values()) == 1
    pairs = {event["id"]: event for event in ends}
    for start in starts:
        end = pairs.pop(start["id"])
        assert (start["cat"], start["name"]) == (end["cat"], end["name"])
        assert end["bp"] == "e"
        assert start["ts"] <= end["ts"]
        [sent], [read] = enclosing(events, start), enclosing(events, end)
        sender, reader = Task.parse(sent), Task.parse(read)
        assert (sender.kind, sender.microbatch) == (reader.kind, reader.microbatch)
        assert reader.virtual_stage == sender.virtual_stage + (1 if sender.kind is Kind.F else -1)
    assert not pairs


def test_an_arrow_comes_after_all_slices_in_the_file(steps: list[StepTrace]) -> None:
    """Viewers bind an arrow to what is open when they read it, and keep the file's order within one instant."""
    kinds = [event["ph"] in "sf" for event in chrome_events(steps[:1])]
    assert kinds == sorted(kinds)


def test_chunks_the_reader_is_the_first_one_after_the_sender() -> None:
    """Two chunks a stage: F of microbatch 0 runs on stage 1 as virtual stage 1, and later as virtual stage 3."""
    spans = tuple(TaskSpan(v % 2, Task(Kind.F, 0, v), float(v), v + 1.0) for v in range(4))
    messages = tuple(MessageSpan(v % 2, (v + 1) % 2, Task(Kind.F, 0, v), v + 1.0, v + 1.0) for v in range(3))
    events = chrome_events([StepTrace(0, 0.0, 4.0, spans, (), messages)])
    assert [enclosing(events, e) for e in of_phase(events, "f")] == [["F0@1"], ["F0@2"], ["F0@3"]]


@pytest.mark.parametrize(
    "trace",
    [
        pytest.param(one_message(None), id="reader not traced"),
        pytest.param(one_message(TaskSpan(1, READ, 2.0, 2.0)), id="reader took no time"),
        pytest.param(one_message(TaskSpan(1, READ, 2.0, 3.0), sender_end=0.0), id="sender took no time"),
        pytest.param(one_message(TaskSpan(1, READ, 0.2, 0.9)), id="reader ended before the sender"),
    ],
)
def test_no_arrow_without_a_slice_at_both_ends(trace: StepTrace) -> None:
    assert {event["ph"] for event in chrome_events([trace])} == {"M", "X", "C"}


def test_clocks_that_differ_a_little_do_not_lose_the_arrow() -> None:
    events = chrome_events([one_message(TaskSpan(1, READ, 0.9, 2.0))])
    [start], [end] = of_phase(events, "s"), of_phase(events, "f")
    assert start["ts"] <= end["ts"]
    assert (enclosing(events, start), enclosing(events, end)) == (["F0@0"], ["F0@1"])


def test_steps_that_all_start_at_zero_are_laid_behind_each_other() -> None:
    """Every simulated step has a clock of its own."""
    steps = [StepTrace(i, 0.0, 2.0, (TaskSpan(0, SEND, 0.5, 1.5),)) for i in range(3)]
    found = slices(chrome_events(steps), "computation")
    assert [event["ts"] for event in found] == [0.5e6, 2.5e6, 4.5e6]


def test_a_step_that_begins_before_all_ranks_returned_does_not_overlap_the_last() -> None:
    """Stage 0 is drained until the step's end, which is another rank's; its own next step is already running."""
    steps = [StepTrace(i, 10.0 * i, 10.0 * i + 10.5, (TaskSpan(0, SEND, 10.0 * i, 10.0 * i + 4.0),)) for i in range(2)]
    events = chrome_events(steps)
    assert [(e["ts"], e["dur"]) for e in slices(events, "wait")] == [(4e6, 6e6), (14e6, 6.5e6)]
    assert [(e["ts"], e["dur"]) for e in slices(events, "step")] == [(0, 10e6), (10e6, 10.5e6)]


def test_a_counter_for_each_stage_has_the_chunk_tasks_that_it_held(steps: list[StepTrace]) -> None:
    counters = of_phase(chrome_events(steps), "C")
    assert {event["name"] for event in counters} == {f"stage {stage} held" for stage in range(4)}
    for stage in range(4):
        levels = [event for event in counters if event["name"] == f"stage {stage} held"]
        assert [event["ts"] for event in levels] == sorted(event["ts"] for event in levels)
        held = [event["args"]["chunk tasks"] for event in levels]
        assert (held[0], held[-1], min(held), max(held) <= 3) == (1, 0, 0, True)
    first = [(event["ts"], event["args"]["chunk tasks"]) for event in counters if event["name"] == "stage 3 held"][:3]
    forward, backward, *_ = (span for span in steps[0].tasks if span.stage == 3)
    held_until = [(forward.start, 1), (backward.end, 0)]
    assert first[:2] == [(pytest.approx((time - 100) * 1e6, abs=1e-3), held) for time, held in held_until]


def held(*spans: tuple[Kind, int, float]) -> list[tuple[float, int]]:
    """The counter of a stage for tasks of one second: each is a kind, a microbatch and a start."""
    tasks = tuple(TaskSpan(0, Task(kind, microbatch, 0), start, start + 1.0) for kind, microbatch, start in spans)
    return counted(StepTrace(0, 0.0, 9.0, tasks), 0)


def counted(trace: StepTrace, stage: int) -> list[tuple[float, int]]:
    counters = [event for event in of_phase(chrome_events([trace]), "C") if event["name"] == f"stage {stage} held"]
    return [(event["ts"] / 1e6, event["args"]["chunk tasks"]) for event in counters]


def test_a_chunk_task_is_held_from_its_forward_to_its_last_task() -> None:
    F, B, W = Kind.F, Kind.B, Kind.W
    assert held((F, 0, 0), (F, 1, 1), (B, 0, 2), (B, 1, 5)) == [(0.0, 1), (1.0, 2), (3.0, 1), (6.0, 0)]
    assert held((F, 0, 0), (B, 0, 2), (W, 0, 4)) == [(0.0, 1), (5.0, 0)]
    assert held((F, 0, 0), (F, 1, 3)) == [(0.0, 1), (1.0, 0), (3.0, 1), (4.0, 0)], "forwards alone"
    assert held((F, 0, 0), (F, 1, 1)) == [(0.0, 1), (1.0, 0), (1.0, 1), (2.0, 0)], "an end comes before a start"
    assert held((B, 0, 0)) == [], "its forward was lost"


def test_each_chunk_counts_and_other_stages_do_not() -> None:
    tasks = [(0, Task(Kind.F, 0, 0), 0.0), (0, Task(Kind.F, 0, 2), 2.0), (0, Task(Kind.B, 0, 0), 4.0)]
    tasks.append((1, Task(Kind.F, 0, 1), 0.0))
    spans = tuple(TaskSpan(stage, task, start, start + 1.0) for stage, task, start in tasks)
    assert counted(StepTrace(0, 0.0, 9.0, spans), 0) == [(0.0, 1), (2.0, 2), (3.0, 1), (5.0, 0)]


def test_the_reader_passes_counters_and_other_programs_events_over(steps: list[StepTrace], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_chrome(path, steps)
    (run,) = read_chrome(path)
    document = json.loads(path.read_text())
    counters = of_phase(document["traceEvents"], "C")
    foreign = [{"ph": "X", "pid": "gpu", "cat": "kernel", "ts": "now"}, {"ph": "C", "args": 3}, {"ph": 1}]
    document["traceEvents"] = [e for e in document["traceEvents"] if e not in counters] + foreign
    path.write_text(json.dumps(document))
    assert read_chrome(path) == [run]


def test_two_runs_can_share_a_file() -> None:
    trace = one_message(TaskSpan(1, READ, 2.0, 3.0))
    both = chrome_events([trace], name="1f1b", pid=1) + chrome_events([trace], name="bf", pid=2)
    names = [event["args"]["name"] for event in both if event["name"] == "process_name"]
    assert names == ["1f1b", "bf"]


def test_no_trace_gives_an_empty_run(tmp_path: Path) -> None:
    write_chrome(tmp_path / "t.json", [])
    assert len(json.loads((tmp_path / "t.json").read_text())["traceEvents"]) == 4


def test_a_wait_of_a_stage_without_tasks_has_a_thread() -> None:
    events = chrome_events([StepTrace(0, 0.0, 1.0, (), (WaitSpan(2, WaitCause.ORDER, 0.0, 1.0),))])
    assert [(e["tid"], e["name"]) for e in slices(events, "wait")] == [(3, "wait: TP order")]


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing/trace\.json: cannot be written \(No such file or directory\)$"):
        write_chrome(tmp_path / "missing" / "trace.json", [])


def test_the_return_of_a_call_that_a_device_goes_on_with_is_an_argument_and_reads_back(tmp_path: Path) -> None:
    """It may lie before the task's start, behind another task, and other readers may pass it over."""
    early = TaskSpan(0, Task(Kind.F, 1, 0), 10.5, 11.0, launched=10.25)
    late = TaskSpan(0, Task(Kind.F, 0, 0), 10.0, 10.5, launched=10.125)
    write_chrome(path := tmp_path / "trace.json", [StepTrace(0, 10.0, 12.0, (late, early))])
    first, second = slices(json.loads(path.read_text())["traceEvents"], "computation")
    assert (first["args"]["launched"], second["args"]["launched"]) == (0.125e6, 0.25e6)
    (run,) = read_chrome(path)
    assert [span.launched for span in run.steps[0].tasks] == [0.125, 0.25]


def test_without_a_device_a_task_has_no_such_argument(steps: list[StepTrace]) -> None:
    assert all("launched" not in task["args"] for task in slices(chrome_events(steps), "computation"))


def test_a_return_that_is_no_time_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_chrome(path, [StepTrace(0, 0.0, 2.0, (TaskSpan(0, SEND, 0.0, 1.0, launched=0.5),))])
    path.write_text(path.read_text().replace('"launched":500000.0', '"launched":"soon"'))
    with pytest.raises(ConfigError, match=r"args.launched is 'soon', must be a finite number"):
        read_chrome(path)
