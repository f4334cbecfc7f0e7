"""Scenarios with faults through the real shell in virtual time, and what their ends must be."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from sim.shell.fault_transport import FaultyTransport, Links

from rrfp import Batch, StageProgram, StepResult, Topology
from rrfp.compute.payload import Payload
from rrfp.core.stage_core import StageCore
from rrfp.errors import PipelineAborted
from rrfp.lab.cluster.ranks import Rank
from rrfp.lab.faults.dataflow import Reference, adds_to_gradient, value_of
from rrfp.lab.faults.faults import AnyId, Death, Fault, Pause, Spike
from rrfp.lab.faults.scenario import Scenario
from rrfp.model.graph import TaskGraph
from rrfp.model.mesh import Mesh
from rrfp.model.tasks import Kind, Mode, StepId, Task
from rrfp.runtime.context import RankSettings
from rrfp.runtime.control_tree import Shares, peers
from rrfp.runtime.stage_runner import StageRunner
from rrfp.runtime.steps.plan import StepPlan, StepPlanner, StepRequest
from rrfp.testing.clock import TimerLane, run_virtual
from rrfp.transports.base import Message, MessageKind, TransportContext
from rrfp.transports.rendezvous import LocalRendezvous


class HashStage(StageProgram):
    """Computes what `rrfp.lab.faults.dataflow` says that tasks compute, from the tensors that really arrived."""

    def __init__(self, graph: TaskGraph, seconds: Callable[[Task], float], lane: TimerLane) -> None:
        self._graph = graph
        self._seconds = seconds
        self._lane = lane
        self._number = 0
        #: By microbatch, what its caller passed.
        self._kwargs: Any = None
        #: By task, of the current step; and the sums by virtual stage.
        self.values: dict[Task, int] = {}
        self.gradients: dict[int, int] = {}

    def open(self, step: StepId, batch: Batch) -> None:
        self._number, self.values, self.gradients = step.number, {}, {}
        self._kwargs = batch.kwargs

    def reopen(self, step: StepId, batch: Batch) -> None:
        self.open(step, batch)

    def forward(self, task: Task, inputs: tuple[Payload, ...]) -> Payload:
        return Payload((self._run(task, _read(inputs)),), ("t", 0))

    def backward(self, task: Task, grads: tuple[Payload, ...]) -> tuple[Payload, ...]:
        out = self._run(task, (self.values[task._replace(kind=Kind.F)], *_read(grads)))
        return (Payload((out,)),) * len(self._graph.predecessors[task.virtual_stage])

    def weight(self, task: Task) -> None:
        self._run(task, (self.values[task._replace(kind=Kind.B)],))

    def _run(self, task: Task, read: tuple[int, ...]) -> torch.Tensor:
        assert task not in self.values, f"{task} ran twice"
        self._lane.spend(self._seconds(task))
        salt = int(self._kwargs[task.microbatch]["salt"])
        value = self.values[task] = value_of(self._number, task, read, salt)
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
        errors: by rank, what it ended with; absent where it did every step.
        problems: what is wrong.
        sent: what the plan could have hit, and when it was sent.
        applied: what it has hit.
    """

    stalled: bool = False
    errors: dict[int, BaseException] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    sent: list[tuple[float, AnyId]] = field(default_factory=list)
    applied: list[Fault] = field(default_factory=list)


def patience(scenario: Scenario) -> float:
    """More than a step takes, in seconds: all its tasks and messages one after the other, and every spike."""
    matrices = (*scenario.durations.values(), *scenario.latencies.values())
    spikes = sum(fault.extra for fault in scenario.faults if isinstance(fault, Spike))
    paces = () if scenario.shared is None else scenario.shared.paces
    slowest = max((pace for row in paces for pace in row), default=1.0)
    return 10.0 + 2 * slowest * sum(map(sum, (row for rows in matrices for row in rows))) + spikes * 50


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
        self._mesh = Mesh((("pp", scenario.graph.placement.stages), ("dp", scenario.parallelism.replicas)))
        #: By step: each task and how often it ran, and gradients summed over replicas, by virtual stage.
        self._ran = [Counter[Task]() for _ in scenario.steps]
        self._gradients = [Counter[int]() for _ in scenario.steps]

    async def run(self) -> ShellRun:
        met = LocalRendezvous()
        graph, scenario = self._scenario.graph, self._scenario
        shares = Shares.NOTHING if scenario.shared is None else Shares.FORWARDS
        contexts = [
            TransportContext(
                int(rank),
                peers(graph, Topology.at(rank, self._mesh), shares=shares),
                "faults",
                met,
                queue_bytes=sys.maxsize,
            )
            for rank in scenario.ranks
        ]
        transports = [FaultyTransport(context, self._links) for context in contexts]
        for fault in scenario.faults:
            if isinstance(fault, Death):
                asyncio.get_running_loop().call_at(fault.at + fault.detection, transports[fault.rank].abort)
        most = 8 * self._patience * len(scenario.steps)
        try:
            async with asyncio.timeout(most):
                await asyncio.gather(*map(self._rank, scenario.ranks, transports))
        except TimeoutError:
            self._outcome.stalled = True
        if not self._outcome.stalled and not self._outcome.errors:
            self._check_sums()
        self._outcome.sent, self._outcome.applied = self._links.network.sent, self._links.network.applied
        return self._outcome

    async def _rank(self, rank: Rank, transport: FaultyTransport) -> None:
        scenario, lane = self._scenario, TimerLane(takes_offers=self._scenario.takes_offers)
        hint, limit = scenario.make_hint(rank.stage), scenario.limits[rank.stage]
        core = StageCore(scenario.graph, rank.stage, hint, limit, in_order=scenario.in_order)
        program = HashStage(scenario.graph, partial(scenario.seconds, rank), lane)
        settings = RankSettings(Topology.at(rank, self._mesh), stall_after=self._patience)
        if scenario.shared is not None:
            settings = replace(settings, replica_seeds=range(self._mesh.replicas), claims=True)
        runner = StageRunner(core, program, lane, transport, settings)
        results: list[StepResult] = []
        try:
            await runner.start()
            for step in scenario.steps:
                plan = self._plan(rank, step)
                program.open(plan.step, plan.batch)
                self._links.step_opened(rank, step.number)
                results.append(await runner.step(plan))
                self._check(rank, step, program)
                await asyncio.sleep(scenario.gaps[rank.stage])
            await runner.settle()
            for step, result in zip(scenario.steps, results, strict=True):
                self._check_peaks(rank.stage, step, result)
            await runner.close()
        except Exception as error:  # a rank's end is what is looked at
            self._outcome.errors[rank] = error
            with_words = [note for note in (await asyncio.gather(runner.close(), return_exceptions=True)) if note]
            self._outcome.problems += [str(one) for one in with_words if not isinstance(one, PipelineAborted)]

    def _plan(self, rank: Rank, step: StepId) -> StepPlan:
        """What the caller of ``rank`` passes: the salt of each microbatch that it has."""
        scenario, pool = self._scenario, self._scenario.pool_of(step, rank)
        # Ranks number the microbatches of all callers by replica, and so must the scenario.
        assert pool is None or [*pool.homes] == sorted(pool.homes)
        here = [m for m in range(step.microbatches) if pool is None or pool.homes[m] == rank.replica]
        sizes = None if scenario.sizes is None else [scenario.sizes[m] for m in here]
        kwargs = [{"salt": torch.tensor(rank.salt)} for _ in here]
        request = StepRequest(step.mode, sizes=sizes, kwargs=kwargs)
        plan = StepPlanner(is_shared=scenario.shared is not None).plan(request, step.number)
        return plan if pool is not None else replace(plan, visits=scenario.visits_of(step))

    def _reference(self, rank: Rank, step: StepId) -> Reference:
        scenario = self._scenario
        return Reference(scenario.graph, step, scenario.salts_of(step, rank), scenario.visits_of(step))

    def _check(self, rank: Rank, step: StepId, program: HashStage) -> None:
        graph, reference = self._scenario.graph, self._reference(rank, step)
        tasks = graph.tasks(rank.stage, step.microbatches, step.mode)
        expected = {*filter(self._scenario.visits_of(step).exists, tasks)}
        if self._scenario.pool_of(step, rank) is not None:
            # Copies claim each chunk for itself.
            own = {(task.microbatch, task.virtual_stage) for task in program.values}
            expected = {task for task in expected if (task.microbatch, task.virtual_stage) in own}
        if program.values != {task: reference.values[task] for task in expected}:
            self._outcome.problems.append(f"{rank.name} computed wrong values in {step}")
        self._ran[step.number].update(program.values.keys())
        self._gradients[step.number].update(program.gradients)

    def _check_sums(self) -> None:
        """Over the replicas each task ran as often as there are callers who have it, and gradients are right."""
        scenario = self._scenario
        for step in scenario.steps:
            times = 1 if scenario.pool_of(step, scenario.ranks[0]) is not None else self._mesh.replicas
            firsts = [rank for rank in scenario.ranks if not rank.stage][:times]
            references = [self._reference(rank, step) for rank in firsts]
            if self._ran[step.number] != dict.fromkeys(references[0].values, times):
                self._outcome.problems.append(f"some tasks did not run, or ran twice, in {step}")
            expected = Counter({v: sum(each.gradients[v] for each in references) for v in references[0].gradients})
            if self._gradients[step.number] != expected:
                self._outcome.problems.append(f"gradients are wrong in {step}")

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
