"""Several chunks a stage through the real shell: tensors change hands on their stage, and are dropped when used."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor

from rrfp import Batch, StageProgram, Topology
from rrfp.compute.payload import Payload
from rrfp.core.stage_core import StageCore
from rrfp.hints.registry import create_hint
from rrfp.memory.admission import Limit
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import Layout
from rrfp.model.tasks import Kind, Mode, StepId, Task
from rrfp.pipeline.faces import PipelineHandle
from rrfp.pipeline.local_ranks import LocalRanks
from rrfp.pipeline.options import complete
from rrfp.runtime.control_tree import peers
from rrfp.runtime.stage_runner import StageRunner
from rrfp.testing.clock import SimulatedTransport, TimerLane, run_virtual
from rrfp.transports.base import TransportContext
from rrfp.transports.rendezvous import LocalRendezvous


class Numbers(StageProgram):
    """Every tensor says which task put it out, and whoever reads one checks that. A task takes a second."""

    def __init__(self, graph: TaskGraph, lane: TimerLane) -> None:
        self.ran: list[Task] = []
        self.most_alive = 0
        self._graph = graph
        self._lane = lane
        self._alive: weakref.WeakSet[Tensor] = weakref.WeakSet()

    def open(self, step: StepId, batch: Batch) -> None:
        self.ran.clear()

    def forward(self, task: Task, inputs: tuple[Payload, ...]) -> Payload:
        self._read(inputs, [Task(Kind.F, task.microbatch, u) for u in self._graph.predecessors[task.virtual_stage]])
        self._run(task)
        return Payload.pack(self._emit(task)) if self._graph.successors[task.virtual_stage] else Payload()

    def backward(self, task: Task, grads: tuple[Payload, ...]) -> tuple[Payload, ...]:
        self._read(grads, [Task(Kind.B, task.microbatch, w) for w in self._graph.successors[task.virtual_stage]])
        self._run(task)
        return tuple(Payload((self._emit(task),)) for _ in self._graph.predecessors[task.virtual_stage])

    def weight(self, task: Task) -> None:
        self._run(task)

    def _run(self, task: Task) -> None:
        self.ran.append(task)
        self._lane.spend(1.0)
        self.most_alive = max(self.most_alive, len(self._alive))

    def _emit(self, task: Task) -> Tensor:
        tensor = torch.tensor([ord(task.kind), task.microbatch, task.virtual_stage])
        self._alive.add(tensor)
        return tensor

    def _read(self, payloads: tuple[Payload, ...], producers: list[Task]) -> None:
        read = [tensor.tolist() for payload in payloads for tensor in payload.tensors if tensor is not None]
        assert read == [[ord(task.kind), task.microbatch, task.virtual_stage] for task in producers]


async def run(graph: TaskGraph, microbatches: int, modes: list[Mode]) -> list[Numbers]:
    """Run steps with one microbatch held at a time; returns the programs as the last step left them."""
    stages = range(graph.placement.stages)
    lanes = [TimerLane() for _ in stages]
    programs = [Numbers(graph, lane) for lane in lanes]
    met = LocalRendezvous()

    async def build(_: int) -> list[StageRunner]:
        return [
            StageRunner(
                StageCore(graph, stage, create_hint("bfw"), Limit(1)),
                programs[stage],
                lanes[stage],
                SimulatedTransport(
                    TransportContext(stage, peers(graph, Topology(stage, graph.placement.stages)), "chunks", met)
                ),
            )
            for stage in stages
        ]

    async with PipelineHandle(LocalRanks(programs, complete({}), build), "caller", "rrfp") as pipe:
        for mode in modes:
            await (pipe.step if mode is Mode.TRAIN else pipe.evaluate)(microbatches=microbatches)
    return programs


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("layout", ["looped", "v"])
@pytest.mark.parametrize(("stages", "chunks"), [(1, 3), (2, 2), (3, 3)])
def test_every_task_reads_what_its_neighbours_put_out(
    stages: int, chunks: int, layout: Layout, split: bool, mode: Mode
) -> None:
    graph = TaskGraph.chain(stages, chunks=chunks, layout=layout, split=split)
    programs = run_virtual(run(graph, 5, [mode, mode]))
    for stage, program in enumerate(programs):
        assert sorted(program.ran) == sorted(graph.tasks(stage, 5, mode))


@pytest.mark.parametrize("mode", list(Mode))
def test_a_tensor_that_changed_hands_on_its_stage_is_dropped_when_it_was_used(mode: Mode) -> None:
    graph = TaskGraph.chain(1, chunks=3)
    (program,) = run_virtual(run(graph, 30, [mode]))
    assert 1 <= program.most_alive <= 3, "the limit lets one microbatch in at a time"
