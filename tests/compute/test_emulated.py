"""Emulated and paced stages take the table's time."""

from __future__ import annotations

import statistics
import time

import pytest
import torch
from compute.stage_driver import Run, build
from torch import nn

from rrfp import Batch
from rrfp.costs import make_costs
from rrfp.lab.emulated import EmulatedStage, PacedStage, sleep_until, table_durations
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Kind, Mode, StepId, Task

STEP = StepId(0, Mode.TRAIN, 2)


def test_sleep_is_punctual() -> None:
    late = []
    for _ in range(60):
        deadline = time.monotonic() + 0.001
        sleep_until(deadline)
        late.append(time.monotonic() - deadline)
    assert min(late) >= 0
    assert statistics.median(late) < 1e-3  # a few us on an idle machine
    started = time.monotonic()
    sleep_until(started - 1)
    assert time.monotonic() - started < 0.01


def test_emulated_stage_runs_a_graph() -> None:
    graph = TaskGraph.chain(3)
    asked: list[Task] = []

    def durations(task: Task) -> float:
        asked.append(task)
        return 0.0

    programs = {v: EmulatedStage(graph, durations, num_bytes=1000) for v in range(3)}
    run = Run(programs, graph, STEP, Batch())
    run.finish()
    assert sorted(asked) == sorted(run.done)
    assert run.done[Task(Kind.F, 0, 0)].num_bytes == 1000
    assert [payload.num_bytes for payload in run.done[Task(Kind.B, 1, 2)]] == [1000]
    assert run.done[Task(Kind.B, 1, 0)] == ()
    assert programs[2].losses() == {0: 0.0, 1: 0.0}
    assert programs[1].losses() == {}


def test_split_stages_have_weight_tasks() -> None:
    graph = TaskGraph.chain(1, split=True)
    program = EmulatedStage(graph, lambda _: 0.002)
    started = time.monotonic()
    program.weight(Task(Kind.W, 0, 0))
    assert time.monotonic() - started >= 0.002


def test_table_durations() -> None:
    table = make_costs("llm", stages=2, microbatches=3, seed=0)
    durations = table_durations(table)
    assert durations(Task(Kind.F, 2, 1)) == table.duration("F", 1, 2)
    assert durations(Task(Kind.B, 0, 0)) == table.duration("B", 0, 0)


def test_paced_stage_sleeps_the_remainder_and_counts_the_overrun() -> None:
    programs, graph = build([nn.Linear(4, 4)], lambda output, target: (output * target).sum())
    durations = {Kind.F: 0.01, Kind.B: 0.0}
    paced = PacedStage(programs[0], lambda task: durations[task.kind])
    rows = [torch.ones(1, 4)] * 2
    run = Run({0: paced}, graph, STEP, Batch(rows, rows, None, (1.0, 1.0)))
    started = time.monotonic()
    run.execute(Task(Kind.F, 0, 0))
    assert time.monotonic() - started >= 0.01
    assert paced.held_bytes(0, 0) == programs[0].held_bytes(0, 0) > 0
    before = paced.overrun_s
    run.execute(Task(Kind.B, 0, 0))  # planned to take no time at all
    assert paced.overrun_s > before
    assert paced.planned_s == pytest.approx(0.01)
    assert paced.overrun_share == paced.overrun_s / paced.planned_s
    run.finish()
    assert paced.losses() == programs[0].losses()
    assert len(paced.losses()) == 2
    paced.reset_overrun()
    assert paced.overrun_share == 0
