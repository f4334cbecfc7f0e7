"""Small scenarios by hand: everything takes a second, a message 0.1 s, a credit 0.01 s."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rrfp.hints.registry import create_hint
from rrfp.lab.faults.faults import Fault, MessageId
from rrfp.lab.faults.scenario import Scenario
from rrfp.memory.admission import Limit
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Kind, Mode, StepId, Task
from rrfp.testing.faults import FaultRun, run_scenario

TRAIN, FORWARD = Mode.TRAIN, Mode.FORWARD


def scenario(
    *faults: Fault, graph: TaskGraph | None = None, steps: Sequence[tuple[Mode, int]] = ((TRAIN, 3),)
) -> Scenario:
    """Two stages unless told otherwise, under bf, without a limit."""
    graph = TaskGraph.chain(2) if graph is None else graph
    stages, count = graph.placement.stages, graph.placement.num_virtual_stages
    most = max(microbatches for _, microbatches in steps)
    rows = ((1.0,) * most,) * count
    slow = ((0.1,) * most,) * count
    return Scenario(
        seed=0,
        graph=graph,
        method="bf",
        make_hint=lambda stage: create_hint("bf"),
        limits=(Limit(),) * stages,
        in_order=frozenset(),
        depth=1,
        steps=tuple(StepId(number, *step) for number, step in enumerate(steps)),
        sizes=None,
        durations=dict.fromkeys(Kind, rows),
        latencies=dict.fromkeys((Kind.F, Kind.B), slow),
        control_latency=0.01,
        release_after=0.0,
        gaps=(0.0,) * stages,
        faults=faults,
    )


def limited(one: Scenario, limit: Limit) -> Scenario:
    """The same with this limit on every stage."""
    return replace(one, limits=(limit,) * len(one.limits))


def output(text: str, sender: int, receiver: int, step: int = 0) -> MessageId:
    return MessageId(step, Task.parse(text), sender, receiver)


def credit(text: str, sender: int, receiver: int, step: int = 0) -> MessageId:
    return MessageId(step, Task.parse(text), sender, receiver, is_credit=True)


def events(one: Scenario) -> tuple[FaultRun, list[str]]:
    """The run, and what happened in it: "TIME stage N ...", times in seconds to four places."""
    lines: list[str] = []
    run = run_scenario(one, trace=lines.append)
    return run, [" ".join(line.split()) for line in lines]
