"""Scenarios with faults through the real shell in virtual time, and what their ends must be."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from sim.shell.fault_transport import FaultyTransport, Links

from rrfp import Batch, StageProgram, StepResult, Topology
from rrfp.compute.payload import Payload
from rrfp.core.stage_core import StageCore
from rrfp.errors import PipelineAborted
from rrfp.lab.faults.dataflow import Reference, adds_to_gradient, value_of
from rrfp.lab.faults.faults import Death, Pause, Spike
from rrfp.lab.faults.scenario import Rows, Scenario
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Kind, Mode, StepId, Task
from rrfp.runtime.context import RankSettings
from rrfp.runtime.control_tree import peers
from rrfp.runtime.stage_runner import StageRunner
from rrfp.runtime.steps.plan import StepPlanner, StepRequest
from rrfp.testing.clock import TimerLane, run_virtual
from rrfp.transports.base import Message, MessageKind, TransportContext
from rrfp.transports.rendezvous import LocalRendezvous


class HashStage(StageProgram):
    """Computes what `rrfp.lab.faults.dataflow` says that tasks compute, from the tensors that really arrived."""

    def __init__(self, graph: TaskGraph, durations: Mapping[Kind, Rows], lane: TimerLane) -> None:
        self._graph = graph
        self._durations = durations
        self._lane = lane
        self._number = 0
        #: By task, of the current step; and the sums by virtual stage.
        self.values: dict[Task, int] = {}
        self.gradients: dict[int, int] = {}

    def open(self, step: StepId, batch: Batch) -> None:
        self._number, self.values, self.gradients = step.number, {}, {}

    def forward(self, task: Task, inputs: tuple[Payload, ...]) -> Payload:
        return Payload((self._run(task, _read(inputs)),), ("t", 0))

    def backward(self, task: Task, grads: tuple[Payload, ...]) -> tuple[Payload, ...]:
        out = self._run(task, (self.values[task._replace(kind=Kind.F)], *_read(grads)))
        return (Payload((out,)),) * len(self._graph.predecessors[task.virtual_stage])

    def weight(self, task: Task) -> None:
        self._run(task, (self.values[task._replace(kind=Kind.B)],))

    def _run(self, task: Task, read: tuple[int, ...]) -> torch.Tensor:
        assert task not in self.values, f"{task} ran twice"
        self._lane.spend(self._durations[task.kind][task.virtual_stage][task.microbatch])
        value = self.values[task] = value_of(self._number, task, read)
        if adds_to_gradient(self._graph, task):
            self.gradients[task.virtual_stage] = self.gradients.get(task.virtual_stage, 0) + value
        return torch.tensor([value])


def _read(payloads: tuple[Payload, ...]) -> tuple[int, ...]:
    return tuple(int(tensor) for payload in payloads for tensor in payload.tensors if tensor is not None)


@dataclass
class ShellRun:
    """What became of a scenario.

    Attributes:
        stalled: it had to be cut off.
        errors: by stage, what its rank ended with; absent where it did every step.
        problems: what is wrong.
    """

    stalled: bool = False
    errors: dict[int, BaseException] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def patience(scenario: Scenario) -> float:
    """More than a step takes, in seconds: all its tasks and messages one after the other, and every spike."""
    matrices = (*scenario.durations.values(), *scenario.latencies.values())
    spikes = sum(fault.extra for fault in scenario.faults if isinstance(fault, Spike))
    return 10.0 + 2 * sum(map(sum, (row for rows in matrices for row in rows))) + spikes * 50


def run_shell(scenario: Scenario, *, checks: bool) -> ShellRun:
    """Run it; nobody can be paused here."""
    faults = tuple(fault for fault in scenario.faults if not isinstance(fault, Pause))
    return run_virtual(_Shell(replace(scenario, faults=faults), checks=checks).run())


class _Shell:
    def __init__(self, scenario: Scenario, *, checks: bool) -> None:
        self._scenario = scenario
        self._patience = patience(scenario)
        self._links = Links(scenario.faults, self._latency, checks=checks, late_after=2 * self._patience)
        self._outcome = ShellRun()
        self._references = [Reference(scenario.graph, step, visits=scenario.visits_of(step)) for step in scenario.steps]

    async def run(self) -> ShellRun:
        met = LocalRendezvous()
        graph, scenario = self._scenario.graph, self._scenario
        contexts = [
            TransportContext(
                stage, peers(graph, Topology(stage, graph.placement.stages)), "faults", met, queue_bytes=sys.maxsize
            )
            for stage in range(graph.placement.stages)
        ]
        transports = [FaultyTransport(context, self._links) for context in contexts]
        for fault in scenario.faults:
            if isinstance(fault, Death):
                asyncio.get_running_loop().call_at(fault.at + fault.detection, transports[fault.rank].abort)
        most = 8 * self._patience * len(scenario.steps)
        try:
            async with asyncio.timeout(most):
                await asyncio.gather(*(self._rank(stage, one) for stage, one in enumerate(transports)))
        except TimeoutError:
            self._outcome.stalled = True
        return self._outcome

    async def _rank(self, stage: int, transport: FaultyTransport) -> None:
        scenario, lane = self._scenario, TimerLane(takes_offers=self._scenario.takes_offers)
        hint, limit = scenario.make_hint(stage), scenario.limits[stage]
        core = StageCore(scenario.graph, stage, hint, limit, in_order=scenario.in_order)
        program = HashStage(scenario.graph, scenario.durations, lane)
        runner = StageRunner(core, program, lane, transport, RankSettings(stall_after=self._patience))
        results: list[StepResult] = []
        try:
            await runner.start()
            for step in scenario.steps:
                sizes = None if scenario.sizes is None else scenario.sizes[: step.microbatches]
                request = StepRequest(step.mode, microbatches=step.microbatches, sizes=sizes)
                plan = replace(StepPlanner().plan(request, step.number), visits=scenario.visits_of(step))
                program.open(plan.step, plan.batch)
                self._links.step_opened(stage, step.number)
                results.append(await runner.step(plan))
                self._check(stage, step, program)
                await asyncio.sleep(scenario.gaps[stage])
            await runner.settle()
            for step, result in zip(scenario.steps, results, strict=True):
                self._check_peaks(stage, step, result)
            await runner.close()
        except Exception as error:  # a rank's end is what is looked at
            self._outcome.errors[stage] = error
            with_words = [note for note in (await asyncio.gather(runner.close(), return_exceptions=True)) if note]
            self._outcome.problems += [str(one) for one in with_words if not isinstance(one, PipelineAborted)]

    def _check(self, stage: int, step: StepId, program: HashStage) -> None:
        graph, reference = self._scenario.graph, self._references[step.number]
        tasks = filter(self._scenario.visits_of(step).exists, graph.tasks(stage, step.microbatches, step.mode))
        expected = {task: reference.values[task] for task in tasks}
        if program.values != expected:
            self._outcome.problems.append(f"stage {stage} computed wrong values in {step}")
        for v in graph.placement.virtual_stages(stage):
            if program.gradients.get(v, 0) != reference.gradients.get(v, 0):
                self._outcome.problems.append(f"stage {stage} has a wrong gradient on {v} in {step}")

    def _check_peaks(self, stage: int, step: StepId, result: StepResult) -> None:
        graph, limit = self._scenario.graph, self._scenario.limits[stage]
        if limit.microbatches is not None:
            chunks = graph.placement.chunks_of(stage)
            may_pass = limit.rule == "paper" and chunks > 1 and step.mode is Mode.TRAIN
            most = limit.microbatches * chunks + may_pass * chunks
            if result.peaks[stage].held > most:
                self._outcome.problems.append(f"stage {stage} held {result.peaks[stage].held} of {most} in {step}")

    def _latency(self, stage: int, peer: int, message: Message) -> float:
        if message.kind is not MessageKind.OUTPUT or message.task is None:
            return self._scenario.control_latency
        kind, microbatch, virtual_stage = message.task
        return self._scenario.latencies[kind][virtual_stage][microbatch]
